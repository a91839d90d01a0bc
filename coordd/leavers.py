"""Which ranks have left, for those that exchange messages with them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from coordd.messages import Left, Traffic
from coordd.wire import bits

__all__ = ["Leavers"]


class Leavers:
    """Has all ranks told of a rank that has left once any of them has a message to or from it under way."""

    def __init__(self) -> None:
        self._left: dict[int, Left] = {}
        self._asked: set[int] = set()

    def leave(self, ranks: int, traffic: Traffic) -> None:
        """Notes that ranks, a bit mask, have left, with their messages."""
        self._left |= {rank: Left(rank, traffic) for rank in bits(ranks)}

    def ask(self, ranks: Iterable[int]) -> None:
        """Notes that a rank has messages to or from these ranks under way."""
        self._asked.update(ranks)

    @property
    def untold(self) -> tuple[Left, ...]:
        """Lists those with messages of which the ranks have not been told."""
        return tuple(left for _, left in sorted(self._left.items()) if left.traffic != Traffic())

    def take(self) -> tuple[Left, ...]:
        """Lists those of which the ranks are to be told, once each."""
        due = sorted(self._asked & self._left.keys())
        self._asked.difference_update(due)
        return tuple(self._left.pop(rank) for rank in due)
