"""Tracks the ranks that have left, for the ranks that exchange messages with them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from coordd.negotiation.wire import bits
from coordd.ops.messages import Left, Traffic

__all__ = ["Leavers"]


class Leavers:
    """Announces a rank that has left to all ranks once any of them has a message to or from it in flight."""

    def __init__(self) -> None:
        self._left: dict[int, Left] = {}
        self._asked: set[int] = set()

    def leave(self, ranks: int, traffic: Traffic) -> None:
        """Records that ranks, given as a bit mask, have left, with their messages."""
        self._left |= {rank: Left(rank, traffic) for rank in bits(ranks)}

    def ask(self, ranks: Iterable[int]) -> None:
        """Records that a rank has messages to or from these ranks in flight."""
        self._asked.update(ranks)

    @property
    def untold(self) -> tuple[Left, ...]:
        """The ranks that have left with messages and have not been announced."""
        return tuple(left for _, left in sorted(self._left.items()) if left.traffic != Traffic())

    def take(self) -> tuple[Left, ...]:
        """Returns the ranks that the next plan announces as left, once each."""
        due = sorted(self._asked & self._left.keys())
        self._asked.difference_update(due)
        return tuple(self._left.pop(rank) for rank in due)
