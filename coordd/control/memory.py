"""The control channel of ranks that live in one process: queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from coordd.control.protocol import LOST, Lost
from coordd.messages import Message

__all__ = ["MemoryControl", "MemoryStar"]


class MemoryStar:
    """What the ends share."""

    def __init__(self, size: int = 1, parents: Sequence[int] = ()) -> None:
        """Makes a star around rank 0, or a tree: ``parents`` says who reports to whom."""
        self.parents = tuple(parents) or (-1,) + (0,) * (size - 1)
        self.inboxes: list[deque[tuple[int, Message | Lost]]] = [deque() for _ in range(size)]
        self.wakes: list[Callable[[], None]] = [lambda: None] * size

    def join(self, rank: int, wake: Callable[[], None] = lambda: None) -> MemoryControl:
        """Makes the end of one rank; ``wake`` is called when something arrives for it."""
        self.wakes[rank] = wake
        return MemoryControl(self, rank)


class MemoryControl:
    """One rank's end."""

    descriptors: tuple[int, ...] = ()

    def __init__(self, star: MemoryStar, rank: int) -> None:
        self._star = star
        self._rank = rank

    def send(self, rank: int, message: Message) -> None:
        """Puts a message into a rank's queue."""
        self._post(rank, message)

    def receive(self) -> list[tuple[int, Message | Lost]]:
        """Empties the queue."""
        inbox = self._star.inboxes[self._rank]
        return [inbox.popleft() for _ in range(len(inbox))]

    def ready(self) -> bool:
        """Says whether something has arrived."""
        return bool(self._star.inboxes[self._rank])

    def close(self) -> None:
        """Tells the other ends that this one is gone."""
        for rank, parent in enumerate(self._star.parents):
            if parent == self._rank:
                self._post(rank, LOST)
            elif rank == self._rank and parent >= 0:
                self._post(parent, LOST)

    def _post(self, rank: int, message: Message | Lost) -> None:
        self._star.inboxes[rank].append((self._rank, message))
        self._star.wakes[rank]()
