"""Pending errors for ranks that submit a tensor that was already rejected. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from coordd.negotiation.ballot import members_mask
from coordd.negotiation.group_names import covers
from coordd.ops.messages import Response

__all__ = ["Owed"]


class _Refusal(NamedTuple):
    """The pending error of a rank, and the bit mask of the ranks that had left when it was created.

    With a plan ``before``, it applies only to announcements from before the rank acknowledges that plan; -1 for all.
    """

    response: Response
    left: int
    before: int


class Owed:
    """Pending errors by name and rank, oldest first."""

    def __init__(self) -> None:
        self._refusals: dict[tuple[str, int], deque[_Refusal]] = {}

    def __bool__(self) -> bool:
        return bool(self._refusals)

    @property
    def names(self) -> set[str]:
        """The operations with a pending error."""
        return {name for name, _ in self._refusals}

    def enter(self, rank: int, refusal: Response, left: int, *, before: int = -1) -> None:
        """Adds a pending error.

        Args:
            rank: the rank that gets it.
            refusal: the error.
            left: bit mask of the ranks that have left.
            before: the error applies only to announcements from before the rank acknowledges this plan; -1 for all.
        """
        self._refusals.setdefault((refusal.request.name, rank), deque()).append(_Refusal(refusal, left, before))

    def discharge(self, rank: int, name: str, members: int) -> bool:
        """Drops a rank's pending errors for an operation or group that it refuses; returns whether there were any.

        The other members have got the error for that part already. The arguments are those of `claim`.
        """
        names = [each for each in self.names if covers(name, each)]
        dropped = [each for each in names if self.claim(rank, each, members) is not None]
        return bool(dropped)

    def claim(self, rank: int, name: str, members: int) -> Response | None:
        """Removes and returns the pending error for a rank's announcement; None if there is none.

        Args:
            rank: the rank that announces.
            name: of the operation.
            members: of the process set, as a bit mask; the error applies if the announcement would have contradicted
                theirs.
        """
        owed = self._refusals.get((name, rank))
        if not owed or not members & members_mask(owed[0].response.recipients) or members & owed[0].left:
            return None
        found = owed.popleft()
        if not owed:
            del self._refusals[name, rank]
        return msgspec.structs.replace(found.response, recipients=(rank,))

    def restart(self, ranks: int, plan: int) -> None:
        """Records that ranks get errors by a plan and restart: earlier pending errors do not apply after it.

        Args:
            ranks: their bit mask.
            plan: its number.
        """
        for (_, rank), owed in self._refusals.items():
            for place, refusal in enumerate(owed):
                if ranks >> rank & 1 and refusal.before < 0:
                    owed[place] = refusal._replace(before=plan)

    def meet(self, ranks: int, plan: int) -> None:
        """Records that ranks met at a barrier in a plan: their later announcements do not belong to an older deadlock.

        Args:
            ranks: those of the barrier, as a bit mask.
            plan: its number.
        """
        for (_, rank), owed in self._refusals.items():
            for place, (response, _, before) in enumerate(owed):
                others = members_mask(response.recipients) & ranks
                if before < 0 and response.deadlock >= 0 and ranks >> rank & 1 and others:
                    owed[place] = owed[place]._replace(before=plan)

    def forget(self, joined: int, all_ranks: int) -> None:
        """Drops the errors of deadlocks in operations of which all members have joined.

        Ranks that joined early know nothing of these deadlocks, and all of them continue with equal counts.

        Args:
            joined: bit mask of the ranks that have joined.
            all_ranks: bit mask of all ranks.
        """

        def over(refusal: _Refusal) -> bool:
            members = refusal.response.request.members
            return refusal.response.deadlock >= 0 and not (members_mask(members) if members else all_ranks) & ~joined

        kept = {
            (name, rank): [each for each in owed if not (joined >> rank & 1 and over(each))]
            for (name, rank), owed in self._refusals.items()
        }
        self._refusals = {key: deque(owed) for key, owed in kept.items() if owed}

    def expiring(self, plan: int) -> bool:
        """Returns whether errors apply only until ranks acknowledge a plan."""
        return any(refusal.before == plan for owed in self._refusals.values() for refusal in owed)

    def acknowledge(self, ranks: int, plan: int) -> None:
        """Drops the errors that apply only until ranks, a bit mask, acknowledge a plan."""
        kept = {
            (name, rank): [each for each in owed if each.before != plan or not ranks >> rank & 1]
            for (name, rank), owed in self._refusals.items()
        }
        self._refusals = {key: deque(owed) for key, owed in kept.items() if owed}
