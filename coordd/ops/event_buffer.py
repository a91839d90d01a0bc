"""The event buffer of one rank: a queue of small records that another thread writes to a file.

One rule: a thread that records never waits. If the queue is full, items are dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeVar

from coordd.ops.messages import Request

__all__ = ["Cycle", "Deck", "Delivery", "Item", "Passage", "Pause", "Spot", "Tape"]

_MOST = 50_000
"""Maximum number of items that wait to be written."""

Returned = TypeVar("Returned")
Spot = tuple[int, ...]
"""Identifies an operation; equal on all ranks."""


class Passage(NamedTuple):
    """The execution of one bucket.

    ``spot`` is equal on all ranks and unique to the operation. ``marks`` are the times when the bucket was queued, when
    its turn came, when each transfer began and ended, and when the results were in place. ``cargo`` are the requests
    with their submission times.
    """

    spot: Spot
    marks: list[float]
    cargo: list[tuple[Request, float]]


class Delivery(NamedTuple):
    """A completed send or receive; ``spot``, the sender and its count, is equal on both ends."""

    word: str
    name: str
    peer: int
    spot: Spot
    nbytes: int
    since: float
    until: float


class Pause(NamedTuple):
    """A wait of a framework thread for an operation."""

    thread: str
    name: str
    since: float
    until: float


class Cycle(NamedTuple):
    """A cycle of the daemon."""

    since: float


Item = Passage | Delivery | Pause | Cycle


class Tape:
    """The event buffer: recorded items that are not yet written. Times are those of `time.monotonic`, in seconds."""

    def __init__(self, *, cycles: bool = False, most: int = _MOST) -> None:
        """Starts empty.

        Args:
            cycles: whether to record the daemon's cycles too.
            most: maximum number of items that wait to be written.
        """
        self.cycles = cycles
        self.dropped = 0
        self.filling = threading.Event()
        """Set when the buffer is half full or the recording ends, to wake the writer before its period is over."""
        self._most = most
        self._items: deque[Item] = deque()
        self._open: dict[Spot, list[float]] = {}

    def queued(self, spot: Spot) -> None:
        """Records that an operation is queued."""
        self._open[spot] = [time.monotonic()]

    def mark(self, spot: Spot) -> None:
        """Records that an operation enters its next phase."""
        if (marks := self._open.get(spot)) is not None:  # else the operation began before the recording
            marks.append(time.monotonic())

    def transfer(self, spot: Spot, steps: Generator[None, None, Returned]) -> Generator[None, None, Returned]:
        """Runs ``steps``, and records their start and end; if they return False, the operation is forgotten."""
        self.mark(spot)
        result = yield from steps
        if result is False:  # a rank voted invalid, so no data has moved
            self._open.pop(spot, None)
        self.mark(spot)
        return result

    def landed(self, spot: Spot, cargo: Iterable[tuple[Request, float]]) -> None:
        """Records that the results are in place; must be called before the handles are notified."""
        if (marks := self._open.pop(spot, None)) is not None:
            marks.append(time.monotonic())
            # The placeholder of a joined rank was never submitted: it counts as submitted when the bucket was queued.
            self._put(Passage(spot, marks, [(request, min(since, marks[0])) for request, since in cargo]))

    def delivered(self, word: str, name: str, peer: int, *, spot: Spot, nbytes: int, since: float) -> None:  # noqa: PLR0913 - a record
        """Records that a send or receive has completed."""
        self._put(Delivery(word, name, peer, spot, nbytes, since, time.monotonic()))

    def pause(self, name: str) -> Callable[[], None]:
        """Records that this thread starts to wait; returns a function to call when the wait ends."""
        since = time.monotonic()

        def end() -> None:
            self._put(Pause(threading.current_thread().name, name, since, time.monotonic()))

        return end

    def cycle(self) -> None:
        """Records a cycle of the daemon, if cycles are recorded."""
        if self.cycles:
            self._put(Cycle(time.monotonic()))

    def drain(self) -> list[Item]:
        """Removes and returns the recorded items."""
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
    """Holds the active event buffer, or None; threads check it first, so that timelines cost nothing while off."""

    __slots__ = ("tape",)

    def __init__(self) -> None:
        self.tape: Tape | None = None
