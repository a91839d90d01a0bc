"""Refusals that ranks will get when they announce their part of what was refused before they came. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from coordd.ballot import members_mask
from coordd.group_names import covers
from coordd.messages import Response

__all__ = ["Owed"]


class _Refusal(NamedTuple):
    """What a rank will be told, and the ranks that had left when it was due, as a bit mask.

    One with a plan ``before`` is only for what the rank announces before it has carried out that plan; -1 for all.
    """

    response: Response
    left: int
    before: int


class Owed:
    """By name and rank, what is owed, oldest first."""

    def __init__(self) -> None:
        self._refusals: dict[tuple[str, int], deque[_Refusal]] = {}

    def __bool__(self) -> bool:
        return bool(self._refusals)

    @property
    def names(self) -> set[str]:
        """The operations of which a refusal is owed."""
        return {name for name, _ in self._refusals}

    def enter(self, rank: int, refusal: Response, left: int, *, before: int = -1) -> None:
        """Notes that a rank will get a refusal.

        Args:
            rank: which.
            refusal: what it gets.
            left: bit mask of the ranks that have left.
            before: the refusal is only for what the rank announces before it has carried out this plan; -1 for all.
        """
        self._refusals.setdefault((refusal.request.name, rank), deque()).append(_Refusal(refusal, left, before))

    def discharge(self, rank: int, name: str, members: int, seen: int) -> bool:
        """Drops what a rank is owed that refuses its part of an operation or a group; says whether there was anything.

        The other members have been told of that part already. The arguments are those of `claim`.
        """
        names = [each for each in self.names if covers(name, each)]
        dropped = [each for each in names if self.claim(rank, each, members, seen) is not None]
        return bool(dropped)

    def claim(self, rank: int, name: str, members: int, seen: int) -> Response | None:
        """Takes what a rank is owed that announces its part.

        Args:
            rank: which.
            name: of the operation.
            members: of the process set, as a bit mask; the rank gets what they would have contradicted.
            seen: the last plan that the rank had carried out when it announced.
        """
        owed = self._refusals.get((name, rank), deque())
        found = next((each for each in owed if not 0 <= each.before <= seen), None)
        if found is None or not members & members_mask(found.response.recipients) or members & found.left:
            return None
        owed.remove(found)
        if not owed:
            del self._refusals[name, rank]
        return msgspec.structs.replace(found.response, recipients=(rank,))

    def restart(self, ranks: int, plan: int) -> None:
        """Notes that ranks get errors by a plan, and begin anew: what they are owed is not for what they announce then.

        Args:
            ranks: their bit mask.
            plan: its number.
        """
        for (_, rank), owed in self._refusals.items():
            for place, refusal in enumerate(owed):
                if ranks >> rank & 1 and refusal.before < 0:
                    owed[place] = refusal._replace(before=plan)

    def meet(self, ranks: int, plan: int) -> None:
        """Notes that ranks have come together by a plan: what they announce later has not failed in an older deadlock.

        Args:
            ranks: those of a barrier, as a bit mask.
            plan: its number.
        """
        for (_, rank), owed in self._refusals.items():
            for place, (response, _, before) in enumerate(owed):
                others = members_mask(response.recipients) & ranks
                if before < 0 and response.deadlock >= 0 and ranks >> rank & 1 and others:
                    owed[place] = owed[place]._replace(before=plan)

    def forget(self, oldest: int) -> None:
        """Drops what is only for announcements of before a plan that all ranks have carried out; ``oldest`` is one."""
        kept = {key: [each for each in owed if not 0 <= each.before <= oldest] for key, owed in self._refusals.items()}
        self._refusals = {key: deque(owed) for key, owed in kept.items() if owed}
