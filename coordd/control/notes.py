"""What the mailboxes of one host's ranks tell each other: notes in rings, and memory that they lend each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coordd.control import ring
from coordd.control.ring import RingReader, RingWriter
from coordd.transport.board import Board
from coordd.transport.commons import Commons
from coordd.transport.loans import Loans

__all__ = ["Notes", "join"]


class Notes:
    """One rank's end.

    Attributes:
        loans: the memory that notes tell of.
    """

    def __init__(
        self,
        rings: Mapping[int, tuple[RingWriter, RingReader]] | None = None,
        boards: Mapping[int, Board] | None = None,
    ) -> None:
        """Takes the rings to and from each neighbour, and the boards of the host, for their bells; or none."""
        self._rings = dict(rings or {})
        self._boards = dict(boards or {})
        self.loans = Loans({rank: self._boards[rank].pid for rank in self._rings})

    def __contains__(self, rank: object) -> bool:
        return rank in self._rings

    def put(self, rank: int, data: bytes) -> bool:
        """Leaves a note with a neighbour, and wakes it; False if there is no room for it now."""
        left = self._rings[rank][0].put(data)
        if left:
            self._boards[rank].call()
        return left

    @property
    def news(self) -> bool:
        """Whether there are any for this rank."""
        return any(reader.news for _, reader in self._rings.values())

    def take(self) -> Iterator[bytes]:
        """Takes them out, those of one neighbour in the order in which they were left.

        Raises:
            RingError: a ring is broken.
        """
        for _, reader in self._rings.values():
            while (data := reader.take()) is not None:
                yield data

    def close(self) -> None:
        """Leaves; what is there stays for who reads it."""
        self.loans.close()


def join(rank: int, gather: Callable[[Any], list[Any]], commons: Commons) -> Notes | None:
    """Connects a rank with all others of its host; all ranks of the world call it.

    Returns:
        None if there are ranks anywhere that cannot see their neighbours' rings: all go the same way.
    """
    rings = ring.join(rank, [other for other in commons.ranks if other != rank], commons.boards, gather)
    return None if rings is None else Notes(rings, commons.boards)
