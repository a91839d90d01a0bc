"""Control channel for ranks in one process: in-memory queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from coordd.negotiation.channel import LOST, Lost
from coordd.ops.messages import Message

__all__ = ["MemoryControl", "MemoryStar"]


class MemoryStar:
    """The state that all ends of the control channel share."""

    def __init__(self, size: int = 1, parents: Sequence[int] = ()) -> None:
        """Creates a star around rank 0, or a tree in which ``parents[rank]`` is the rank that ``rank`` reports to."""
        self.parents = tuple(parents) or (-1,) + (0,) * (size - 1)
        self.inboxes: list[deque[tuple[int, Message | Lost]]] = [deque() for _ in range(size)]
        self.wakes: list[Callable[[], None]] = [lambda: None] * size

    def join(self, rank: int, wake: Callable[[], None] = lambda: None) -> MemoryControl:
        """Creates the end of one rank; ``wake`` is called when a message arrives for it."""
        self.wakes[rank] = wake
        return MemoryControl(self, rank)


class MemoryControl:
    """One rank's end of the control channel."""

    descriptors: tuple[int, ...] = ()

    def __init__(self, star: MemoryStar, rank: int) -> None:
        self._star = star
        self._rank = rank

    def send(self, rank: int, message: Message) -> None:
        """Appends a message to a rank's queue."""
        self._post(rank, message)

    def receive(self) -> list[tuple[int, Message | Lost]]:
        """Removes and returns all queued messages with their senders."""
        inbox = self._star.inboxes[self._rank]
        return [inbox.popleft() for _ in range(len(inbox))]

    def ready(self) -> bool:
        """Returns whether a message is queued."""
        return bool(self._star.inboxes[self._rank])

    def close(self) -> None:
        """Sends `LOST` to the parent and the children of this rank."""
        for rank, parent in enumerate(self._star.parents):
            if parent == self._rank:
                self._post(rank, LOST)
            elif rank == self._rank and parent >= 0:
                self._post(parent, LOST)

    def _post(self, rank: int, message: Message | Lost) -> None:
        self._star.inboxes[rank].append((self._rank, message))
        self._star.wakes[rank]()
