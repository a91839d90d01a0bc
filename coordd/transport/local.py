"""In-process data plane: ranks as threads of one process, and a world of one rank.

Sends and receives are matched in a shared mailbox; the receiver copies straight out of the sender's array.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordd.transport.protocol import ANY, Ticket

__all__ = ["LocalTransport", "LocalWorld"]

_TAGS = 1 << 30


class _Message:
    """One side of a transfer that waits for the other side."""

    __slots__ = ("array", "complete", "partner", "source", "wake")

    def __init__(self, array: np.ndarray, source: int, wake: Callable[[], None]) -> None:
        self.array = array
        self.source = source
        self.wake = wake
        self.complete = False


class LocalLane:
    """One rank's side of a mailbox."""

    tags = _TAGS

    def __init__(self, rank: int, mailbox: _Mailbox, wake: Callable[[], None]) -> None:
        self._rank = rank
        self._mailbox = mailbox
        self._wake = wake

    def isend(self, array: np.ndarray, destination: int, tag: int) -> Ticket:
        """Starts the send of a flat array."""
        message = _Message(array, self._rank, self._wake)
        self._mailbox.send(message, destination, tag)
        return message

    def irecv(self, array: np.ndarray, source: int, tag: int) -> Ticket:
        """Starts a receive."""
        message = _Message(array, source, self._wake)
        self._mailbox.receive(message, self._rank, tag)
        return message

    def done(self, tickets: Sequence[Ticket]) -> bool:
        """Returns whether all transfers are complete."""
        return all(ticket.complete for ticket in tickets)

    def cancel(self, ticket: Ticket) -> None:
        """Withdraws a receive."""
        self._mailbox.withdraw(ticket)


class _Mailbox:
    """Unmatched sends and receives of all ranks, by destination and tag, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[tuple[int, int], deque[_Message]] = {}
        self._wanted: dict[tuple[int, int], deque[_Message]] = {}

    def send(self, message: _Message, destination: int, tag: int) -> None:
        self._meet(message, (destination, tag), mine=self._sent, theirs=self._wanted)

    def receive(self, message: _Message, destination: int, tag: int) -> None:
        self._meet(message, (destination, tag), mine=self._wanted, theirs=self._sent)

    def withdraw(self, message: _Message) -> None:
        with self._lock:
            for queue in self._wanted.values():
                if message in queue:
                    queue.remove(message)

    def _meet(
        self,
        message: _Message,
        key: tuple[int, int],
        *,
        mine: dict[tuple[int, int], deque[_Message]],
        theirs: dict[tuple[int, int], deque[_Message]],
    ) -> None:
        """Completes a transfer if its other side is present, else queues this side."""
        with self._lock:
            queue = theirs.get(key, ())
            partner = next(
                (
                    other
                    for other in queue
                    if ANY
                    in (
                        message.source,
                        other.source,
                    )
                    or other.source == message.source
                ),
                None,
            )
            if partner is None:
                mine.setdefault(key, deque()).append(message)
                return
            theirs[key].remove(partner)
            if not theirs[key]:
                del theirs[key]
        wanted, sent = (message, partner) if mine is self._wanted else (partner, message)
        data = sent.array.view(np.uint8)
        wanted.array.view(np.uint8)[: data.size] = data
        message.complete = partner.complete = True
        partner.wake()


class LocalTransport:
    """One rank of a `LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int, wake: Callable[[], None]) -> None:
        self.rank = rank
        self.size = world.size
        self.collective = LocalLane(rank, world.collective, wake)
        self.matched = LocalLane(rank, world.matched, wake)
        self._world = world

    def gather(self, value: Any) -> list[Any]:
        """Exchanges one value with all ranks; blocks."""
        return self._world.gather(self.rank, value)

    def close(self, *, failed: bool) -> None:
        """Does nothing; there is nothing to free."""


class LocalWorld:
    """The state that the ranks of one process share."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.collective = _Mailbox()
        self.matched = _Mailbox()
        self._values: dict[int, Any] = {}
        self._barrier = threading.Barrier(size)

    def join(self, rank: int, wake: Callable[[], None] = lambda: None) -> LocalTransport:
        """Creates the data plane of one rank; ``wake`` is called when something arrives for it."""
        return LocalTransport(self, rank, wake)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Exchanges one value with all ranks; blocks."""
        self._values[rank] = value
        self._barrier.wait()
        found = [self._values[peer] for peer in range(self.size)]
        self._barrier.wait()
        return found
