"""What happens on one rank, noted as cheaply as possible: a few numbers in a queue, which another thread writes out.

Its one rule: who notes never waits. A full queue drops, and counts what it drops.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeVar

from coordd.messages import Request

__all__ = ["Cycle", "Deck", "Delivery", "Item", "Passage", "Pause", "Spot", "Tape"]

_MOST = 50_000
"""Items that wait to be written, at most."""

Returned = TypeVar("Returned")
Spot = tuple[int, ...]
"""What tells an operation from all others, on all ranks alike."""


class Passage(NamedTuple):
    """How the tensors of one bucket travelled.

    ``spot`` is equal on all ranks, and no other operation has it. ``marks`` are when the bucket was put in line, when
    its turn came, when each transfer began and ended, and when the results were where they belong. ``cargo`` are the
    requests with the times at which they were submitted.
    """

    spot: Spot
    marks: list[float]
    cargo: list[tuple[Request, float]]


class Delivery(NamedTuple):
    """A matched send or receive that has ended; ``spot``, the sender and its count, is equal on both ends."""

    word: str
    name: str
    peer: int
    spot: Spot
    nbytes: int
    since: float
    until: float


class Pause(NamedTuple):
    """A framework thread that waited for an operation."""

    thread: str
    name: str
    since: float
    until: float


class Cycle(NamedTuple):
    """A pass of the daemon."""

    since: float


Item = Passage | Delivery | Pause | Cycle


class Tape:
    """What has been noted and not yet written. Times are those of `time.monotonic`, in seconds."""

    def __init__(self, *, cycles: bool = False, most: int = _MOST) -> None:
        """Starts empty.

        Args:
            cycles: whether to note the daemon's cycles, too.
            most: items that wait to be written.
        """
        self.cycles = cycles
        self.dropped = 0
        self.filling = threading.Event()
        """Set when it is time to write."""
        self._most = most
        self._items: deque[Item] = deque()
        self._open: dict[Spot, list[float]] = {}

    def queued(self, spot: Spot) -> None:
        """Notes that an operation is in line."""
        self._open[spot] = [time.monotonic()]

    def mark(self, spot: Spot) -> None:
        """Notes that an operation has come further."""
        if (marks := self._open.get(spot)) is not None:  # else it began before the tape did
            marks.append(time.monotonic())

    def transfer(self, spot: Spot, steps: Generator[None, None, Returned]) -> Generator[None, None, Returned]:
        """Carries steps out, and notes when they begin and end; if they end with False, nothing has happened."""
        self.mark(spot)
        result = yield from steps
        if result is False:  # some rank's word was invalid
            self._open.pop(spot, None)
        self.mark(spot)
        return result

    def landed(self, spot: Spot, cargo: Iterable[tuple[Request, float]]) -> None:
        """Notes that results are where they belong; to be called before anybody is told."""
        if (marks := self._open.pop(spot, None)) is not None:
            marks.append(time.monotonic())
            # What stands in for a rank that has joined was never submitted: it is there when it is wanted.
            self._put(Passage(spot, marks, [(request, min(since, marks[0])) for request, since in cargo]))

    def delivered(self, word: str, name: str, peer: int, *, spot: Spot, nbytes: int, since: float) -> None:  # noqa: PLR0913 - a record
        """Notes that a send or receive has ended."""
        self._put(Delivery(word, name, peer, spot, nbytes, since, time.monotonic()))

    def pause(self, name: str) -> Callable[[], None]:
        """Notes that this thread begins to wait; the result is to be called when it goes on."""
        since = time.monotonic()

        def end() -> None:
            self._put(Pause(threading.current_thread().name, name, since, time.monotonic()))

        return end

    def cycle(self) -> None:
        """Notes a pass of the daemon, if that is wanted."""
        if self.cycles:
            self._put(Cycle(time.monotonic()))

    def drain(self) -> list[Item]:
        """Removes and returns what has been noted."""
        self.filling.clear()
        return [self._items.popleft() for _ in range(len(self._items))]

    def _put(self, item: Item) -> None:
        length = len(self._items)
        if length < self._most:
            self._items.append(item)
        else:
            self.dropped += 1
        if length == self._most // 2:
            self.filling.set()


class Deck:
    """Where the tape is that runs, or none. All who note look here, so that nothing is spent while none runs."""

    __slots__ = ("tape",)

    def __init__(self) -> None:
        self.tape: Tape | None = None
