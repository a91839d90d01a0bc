"""The operation that each simulated script waits for: the truth with which the coordinator's decisions are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Turn", "Waits"]


class Turn(Protocol):
    """An operation that a script can wait for: a round, or a message, whose peer comes last among the members."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""
        ...


class Waits:
    """By rank, the operation that its script waits for without a time limit, and earlier waits that were broken off.

    A wait that was broken off stays here until the coordinator is notified; until then the coordinator does not know
    either what the rank has submitted since.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self._now: dict[int, Turn] = {}
        self._broken: dict[int, list[Turn]] = {}
        self._since: dict[int, set[Turn]] = {}

    def begin(self, rank: int, turn: Turn | None) -> None:
        """Records the operation that a script waits for; None if it does not wait, or another thread may submit."""
        if turn is None:
            self._now.pop(rank, None)
        else:
            self._now[rank] = turn

    def break_off(self, rank: int, *, told: bool) -> None:
        """Records that an exception has ended a wait; ``told`` if the rank had reported it to the coordinator."""
        if (turn := self._now.pop(rank, None)) is not None and told:
            self._broken.setdefault(rank, []).append(turn)

    def submit(self, rank: int, turn: Turn) -> None:
        """Records that a rank has submitted its part of a round."""
        if rank in self._broken:
            self._since.setdefault(rank, set()).add(turn)

    def heard(self, ranks: int) -> None:
        """Records that the coordinator knows that ranks, a bit mask, are not blocked."""
        for rank in [rank for rank in self._broken if ranks >> rank & 1]:
            del self._broken[rank]
            self._since.pop(rank, None)

    def deadlocked(self, pending: Callable[[Turn], set[int] | None]) -> set[int]:
        """Returns the ranks that wait forever.

        Args:
            pending: returns the ranks whose submission or receive of a round is pending; None if one of them has
                completed it.
        """
        missing: dict[int, set[int]] = {}
        for rank in {*self._now, *self._broken}:
            for turn in [*self._broken.get(rank, []), *([self._now[rank]] if rank in self._now else [])]:
                told = pending(turn)
                if told is not None and rank in told:
                    known = {each for each in told if turn not in self._since.get(each, ())}
                    missing.setdefault(rank, set()).update({*turn.members} - known)
        while True:
            left = {rank: others for rank, others in missing.items() if others & missing.keys()}
            if len(left) == len(missing):
                return {*left}
            missing = left
