"""Messages between the peer-to-peer mailboxes of one host: notes in rings, and blocks of memory lent to a neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coordd.transport.shared_memory import ring_buffer
from coordd.transport.shared_memory.board import Board
from coordd.transport.shared_memory.host_memory import Commons
from coordd.transport.shared_memory.loans import Loans
from coordd.transport.shared_memory.ring_buffer import RingReader, RingWriter

__all__ = ["Notes", "join"]


class Notes:
    """One rank's end.

    Attributes:
        loans: the memory blocks that notes refer to.
    """

    def __init__(
        self,
        rings: Mapping[int, tuple[RingWriter, RingReader]] | None = None,
        boards: Mapping[int, Board] | None = None,
    ) -> None:
        """Stores the rings to and from each neighbour, and the boards of the host, which wake neighbours.

        Both are empty by default.
        """
        self._rings = dict(rings or {})
        self._boards = dict(boards or {})
        self.loans = Loans({rank: self._boards[rank].pid for rank in self._rings})

    def __contains__(self, rank: object) -> bool:
        return rank in self._rings

    def put(self, rank: int, data: bytes) -> bool:
        """Puts a note into a neighbour's ring and wakes the neighbour; returns False if the ring has no room now."""
        left = self._rings[rank][0].put(data)
        if left:
            self._boards[rank].call()
        return left

    @property
    def news(self) -> bool:
        """Whether there are notes for this rank."""
        return any(reader.news for _, reader in self._rings.values())

    def take(self) -> Iterator[bytes]:
        """Yields the notes for this rank; those of one neighbour in the order in which they were put.

        Raises:
            RingError: a ring is corrupt.
        """
        for _, reader in self._rings.values():
            while (data := reader.take()) is not None:
                yield data

    def close(self) -> None:
        """Closes the loans; notes in the rings stay there for their readers."""
        self.loans.close()


def join(rank: int, gather: Callable[[Any], list[Any]], commons: Commons) -> Notes | None:
    """Connects a rank with all other ranks of its host; all ranks of the world must call it.

    Returns:
        None if any rank of the job cannot map its neighbours' rings: all ranks make the same choice.
    """
    rings = ring_buffer.join(rank, [other for other in commons.ranks if other != rank], commons.boards, gather)
    return None if rings is None else Notes(rings, commons.boards)
