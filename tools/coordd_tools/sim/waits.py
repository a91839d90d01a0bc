"""For which operation each simulated script waits: the truth that a verdict on them is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Turn", "Waits"]


class Turn(Protocol):
    """What a script can wait for: a round, or a message to a rank, which comes last among the members."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that it concerns."""
        ...


class Waits:
    """By rank, what its script waits for without a time limit, and what it has waited for until it was broken off.

    Of a wait that was broken off the coordinator has yet to hear; until then it does not know either what the rank has
    submitted since.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self._now: dict[int, Turn] = {}
        self._broken: dict[int, list[Turn]] = {}
        self._since: dict[int, set[Turn]] = {}

    def begin(self, rank: int, turn: Turn | None) -> None:
        """Notes what a script waits for; with None that it does not, or that another thread of it may submit."""
        if turn is None:
            self._now.pop(rank, None)
        else:
            self._now[rank] = turn

    def break_off(self, rank: int, *, told: bool) -> None:
        """Notes that an exception has ended a wait; if the rank had told of it, the coordinator has yet to hear."""
        if (turn := self._now.pop(rank, None)) is not None and told:
            self._broken.setdefault(rank, []).append(turn)

    def submit(self, rank: int, turn: Turn) -> None:
        """Notes that a rank has submitted its part of a round."""
        if rank in self._broken:
            self._since.setdefault(rank, set()).add(turn)

    def heard(self, ranks: int) -> None:
        """Notes that the coordinator has heard that ranks, a bit mask, are not blocked."""
        for rank in [rank for rank in self._broken if ranks >> rank & 1]:
            del self._broken[rank]
            self._since.pop(rank, None)

    def deadlocked(self, pending: Callable[[Turn], set[int] | None]) -> set[int]:
        """Finds the ranks that will wait for ever.

        Args:
            pending: the ranks whose submission of a round waits, or receive; None if one has carried it out, or sent.
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
