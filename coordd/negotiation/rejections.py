"""Calls and operations that a rank has refused: the other ranks' announcements of them fail at any time. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from coordd.negotiation.group_names import group_of, is_unnamed
from coordd.negotiation.wire import bits
from coordd.ops.messages import Refused, Request, Response

__all__ = ["Refusals", "RefusedParts", "answer"]


_Key = tuple[str, tuple[int, ...]]
"""A name, and the members of the process set."""


@dataclass
class _Call:
    """The first refusal of a call, and the members that may still announce part of it, as a bit mask."""

    first: Refused
    inside: int


@dataclass
class _Part:
    """An operation, or a group, in which a rank has refused its part.

    Attributes:
        first: the refusal.
        wanted: the members, as a bit mask.
        inside: the members that have yet to announce their part, or all of it.
        heard: by rank, how many operations of the group it has announced.
        before: by rank, the plan that ends the rank's part of this operation, once the rank acknowledges it.
    """

    first: Refused
    wanted: int
    inside: int
    heard: Counter[int] = field(default_factory=Counter)
    before: dict[int, int] = field(default_factory=dict)

    def acknowledge(self, ranks: int, plan: int) -> None:
        """Records that ranks, a bit mask, have acknowledged a plan."""
        self.inside &= ~sum(1 << rank for rank, known in self.before.items() if known == plan and ranks >> rank & 1)

    def hear(self, ranks: int, size: int) -> None:
        """Records that ranks have announced an operation of a group of ``size``; merged reports change their order."""
        self.heard.update(bits(ranks) if size > 1 else ())
        self.inside &= ~sum(1 << rank for rank in bits(ranks) if size == 1 or self.heard[rank] == size)


class Refusals:
    """By the id of a call, the ranks that have refused it.

    A call is forgotten once every member has left it by an error or has left the job: no rank announces part of it
    after that.
    """

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __contains__(self, call: str) -> bool:
        return call in self._calls

    def enter(self, refused: Refused, members: int, left: int) -> bool:
        """Records that a rank has refused a call; returns whether it is the first of the members.

        Args:
            refused: the refusal.
            members: bit mask of the ranks that make the call together.
            left: bit mask of the ranks that have left the job.
        """
        call = self._calls.get(refused.call)
        if new := call is None:
            call = self._calls[refused.call] = _Call(refused, members & ~left)
        call.inside &= ~(1 << refused.rank)
        if not call.inside:
            del self._calls[refused.call]
        return new

    def leave(self, ranks: int) -> None:
        """Records that ranks, a bit mask, will announce nothing more."""
        for name, call in [*self._calls.items()]:
            call.inside &= ~ranks
            if not call.inside:
                del self._calls[name]

    def response(self, request: Request, ranks: int) -> Response:
        """Returns the error for ranks, a bit mask, that announce part of a call that was refused."""
        return answer(self._calls[request.call].first, request, ranks)


class RefusedParts:
    """Operations in which a rank has refused its part, by name and process set, oldest first.

    A group has one entry, under its own name, because the ranks' groups may differ in size.

    Each of them is forgotten once every other member has announced or refused its part, has joined or left the job. So
    the n-th operation of a name is the same one on all members, whether they announce or refuse it.
    """

    def __init__(self, all_ranks: int) -> None:
        """Starts without refusals; ``all_ranks`` is their bit mask."""
        self._all_ranks = all_ranks
        self._parts: dict[_Key, list[_Part]] = {}
        self._sets: dict[str, dict[tuple[int, ...], None]] = {}
        self._unmet: dict[int, int] = {}  # by rank, the ranks that it has not met since the error of a deadlock

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of operations and groups, except unnamed ones, which never come again."""
        return iter(self._sets)

    def enter(  # noqa: PLR0913 - all that is known of it
        self,
        refused: Refused,
        name: str,
        wanted: int,
        inside: int,
        told: Mapping[str, int],
        *,
        before: Mapping[int, int],
    ) -> None:
        """Records that a rank has refused its part of an operation or a group.

        Args:
            refused: the refusal.
            name: of the operation, or of the group.
            wanted: bit mask of its members.
            inside: bit mask of the members that may still announce theirs.
            told: by name, bit mask of the members that have announced it.
            before: by rank, the plan that ends its part, once it acknowledges that; only for ranks with such a plan.
        """
        part = _Part(refused, wanted, inside, before=dict(before))
        for each, ranks in told.items():
            part.hear(ranks, 1 if each == name else group_of(each)[1])
        if part.inside:
            key = name, refused.members
            self._parts.setdefault(key, []).append(part)
            if not is_unnamed(name):
                self._sets.setdefault(name, {})[refused.members] = None

    def claim(self, name: str, members: tuple[int, ...], ranks: int) -> list[tuple[Refused, int]]:
        """Removes and returns the refusals for ranks that announce or refuse their part, with the ranks of each.

        Args:
            name: of the operation, or of the group.
            members: of the process set.
            ranks: bit mask of the ranks that announce or refuse it.
        """
        if not self._parts:
            return []
        found = []
        group, size = group_of(name)
        for key, count in (((name, members), 1), ((group, members), size)):
            for part in self._parts.get(key, ()):
                if concerned := part.inside & ranks:
                    found.append((part.first, concerned))
                    part.hear(concerned, count)
                    ranks &= ~concerned
            self._forget(key)
        return found

    def take_over(self, name: str, members: tuple[int, ...], wanted: int, told: int) -> tuple[Refused, str] | None:
        """Finds a refusal that names another process set than the one with which other ranks announce the operation.

        The refusal is forgotten: that set was a mistake, and may have members that have nothing to do with the
        operation.

        Args:
            name: of the operation.
            members: the set with which it is announced.
            wanted: the same, as a bit mask.
            told: bit mask of the ranks that have announced it.

        Returns:
            the refusal, and the name of the operation or group in it.
        """
        for said in (name, group_of(name)[0]) if self._sets else ():
            for other in [*self._sets.get(said, ())]:
                for part in self._parts[said, other] if other != members else ():
                    if part.inside & told and wanted & ~told & 1 << part.first.rank:
                        part.inside = 0  # no rank announces it with that set
                        self._forget((said, other))
                        return part.first, said
        return None

    def restart(self, ranks: int, plan: int) -> None:
        """Records that ranks get errors by a plan and restart: earlier refusals apply until they acknowledge it.

        Args:
            ranks: their bit mask.
            plan: its number.
        """
        self.inform(ranks)
        for part in self._all():
            part.before |= {rank: plan for rank in bits(part.inside & ranks) if rank not in part.before}

    def inform(self, ranks: int) -> None:
        """Records that ranks, a bit mask, get the error of a deadlock, and may give up operations because of it."""
        self._unmet |= dict.fromkeys(bits(ranks), self._all_ranks)

    def meet(self, ranks: int, plan: int) -> None:
        """Records that ranks met at a barrier in a plan.

        Ranks that got the error of a deadlock since they last met others have given up operations, and the refusing
        rank may not have known of that. So its refusals apply to them only until they acknowledge the plan.

        Args:
            ranks: those of the barrier, as a bit mask.
            plan: its number.
        """
        for part in self._all() if self._unmet else ():
            met = bits(part.inside & ranks) if ranks >> part.first.rank & 1 else ()
            part.before |= {rank: plan for rank in met if self._unmet.get(rank, 0) >> part.first.rank & 1}
        self.note_met(ranks)

    def note_met(self, ranks: int) -> None:
        """Records that ranks, a bit mask, met at a barrier or in a join, and go on with equal counts of operations."""
        unmet = {rank: left & ~ranks if ranks >> rank & 1 else left for rank, left in self._unmet.items()}
        self._unmet = {rank: left for rank, left in unmet.items() if left}

    def expiring(self, plan: int) -> bool:
        """Returns whether refusals apply to some ranks only until these acknowledge a plan."""
        return any(plan in part.before.values() for part in self._all())

    def acknowledge(self, ranks: int, plan: int) -> None:
        """Records that ranks, a bit mask, have acknowledged a plan."""
        for part in self._all():
            part.acknowledge(ranks, plan)
        for key in [*self._parts]:
            self._forget(key)

    def leave(self, ranks: int, wide: int) -> None:
        """Records that ranks announce nothing more for now in the sets within ``wide``; both are bit masks."""
        for part in self._all():
            part.inside &= ~(0 if part.wanted & ~wide else ranks)
        for key in [*self._parts]:
            self._forget(key)

    def _all(self) -> Iterator[_Part]:
        return itertools.chain.from_iterable(self._parts.values())

    def _forget(self, key: _Key) -> None:
        if (parts := self._parts.get(key)) is not None:
            parts[:] = [part for part in parts if part.inside]
            if not parts:
                del self._parts[key]
                name, members = key
                if (sets := self._sets.get(name)) is not None:
                    sets.pop(members, None)
                    if not sets:
                        del self._sets[name]


def answer(refused: Refused, request: Request, ranks: int) -> Response:
    """Creates the error for ranks, a bit mask, that have announced part of a refused call or operation."""
    return Response(request, error=refused.reason, recipients=tuple(bits(ranks)), refuser=refused.rank)
