"""The coordinator's mind: from what each rank has announced to what all ranks do next.

Pure: no thread, clock or socket. Reports go in, plans come out; the order of a plan depends on the order of the
reports only where it must, and every rank carries out the same sequence of plans.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from coordd.cache import ResponseCache
from coordd.errors import MismatchError, spans
from coordd.fusion import buckets, size
from coordd.latch import Latch
from coordd.messages import Announcement, Kind, Plan, Report, Request, Response, Waiting
from coordd.repetition import Slots
from coordd.verdict import sites, verdict
from coordd.wire import bits, mask

__all__ = ["Negotiator"]


class _Former(NamedTuple):
    """What a slot held before the plan ``sequence``, and where each rank submitted it."""

    sequence: int
    slot: int
    request: Request
    sites: dict[int, str]


class _Owed(NamedTuple):
    """A refusal that a rank will get when it announces its part, and who had left when it was due."""

    refusal: Response
    left: frozenset[int]


class _Entry:
    """One name in one process set: who has announced it, and when the lowest member did among all that it announced."""

    __slots__ = ("by_rank", "members", "name", "turn")

    def __init__(self, name: str, members: tuple[int, ...]) -> None:
        self.name = name
        self.members = members
        self.by_rank: dict[int, Announcement] = {}
        self.turn = 0


_MOST_LINES = 256
_ALONE_BYTES = 128 << 10


def _lines(group: Sequence[Response]) -> list[Slots]:
    """Divides a bucket as it is locked: what is large gains nothing from company, and need not wait for it."""
    large: list[Slots] = [(response.slot,) for response in group if size(response.request) >= _ALONE_BYTES]
    small = tuple(response.slot for response in group if size(response.request) < _ALONE_BYTES)
    return [small, *large] if small else large


class Negotiator:
    """Holds the message table: who has announced what.

    A tensor is released when every member of its process set has announced it. Known tensors are counted as bits in
    one integer a rank; the others as entries by name and process set. Released together, the known ones come first, and
    the others in the order in which the lowest member announced them, whatever order the reports arrived in.
    """

    def __init__(self, size: int, *, cache_capacity: int, fusion_bytes: int, lock_steps: int = 0) -> None:
        """Starts with an empty table for ``size`` ranks; ``lock_steps`` equal steps lock the plan, 0: never."""
        self._world = tuple(range(size))
        self._latch = Latch(lock_steps)
        self._fusion_bytes = fusion_bytes
        self._sequence = 0
        self._cache = ResponseCache(cache_capacity)
        self._announced = [0] * size
        self._filled = [0] * size
        self._slots_of: dict[tuple[int, ...], int] = {}
        self._sites: dict[int, dict[int, str]] = {}
        self._table: dict[str, dict[tuple[int, ...], _Entry]] = {}
        self._complete: list[_Entry] = []
        self._refused: list[Response] = []
        self._poisoned: dict[tuple[str, int], deque[_Owed]] = {}
        self._replaced: deque[_Former] = deque()
        self._seen = [0] * size
        self._heard = [0] * size
        self._left: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether every rank has left."""
        return len(self._left) == len(self._world)

    @property
    def unlocking(self) -> bool:
        """Whether a lock has ended of whose end the ranks have yet to be told."""
        return self._latch.ended != 0

    def hear(self, rank: int, report: Report) -> None:
        """Enters what a rank has new."""
        self._seen[rank] = max(self._seen[rank], report.seen)
        self._latch.hear(report)
        hits = int.from_bytes(report.hits, "little")
        if hits:
            fillers = int.from_bytes(report.fillers, "little")
            for former in self._outdated(report.seen, hits):
                hits &= ~(1 << former.slot)
                site = former.sites.get(rank, "")
                self._enter(rank, Announcement(former.request, site, bool(fillers >> former.slot & 1)), report.seen)
            hits &= ~self._latch.overtaken(report.seen)
            for slot in bits(hits & self._spelled_out()):
                hits &= ~(1 << slot)
                self._enter(rank, self._known(rank, slot, filler=bool(fillers >> slot & 1)), report.seen)
            self._announced[rank] |= hits
            self._filled[rank] |= hits & fillers
        for announcement in report.fresh:
            self._enter(rank, announcement, report.seen)

    def leave(self, rank: int) -> None:
        """Notes that a rank will announce nothing more; what it waits for, and what waits for it, fails."""
        for slot in bits(self._announced_by_any()):
            self._spell_out(slot)
        self._left.add(rank)
        for entry in [entry for sets in self._table.values() for entry in sets.values()]:
            if entry not in self._complete:
                self._settled(entry)

    def decide(self) -> Plan | None:
        """Releases everything that is ready; None when there is nothing to say."""
        ready, voids = self._ready_slots()
        if not (ready or self._complete or self._refused or self._latch.ended):
            return None
        self._sequence += 1
        hits = ready & ~voids
        earnest = hits & ~functools.reduce(operator.or_, self._filled)
        self._cache.touch(bits(hits))
        for rank in self._world:
            self._announced[rank] &= ~ready
            self._filled[rank] &= ~ready
        responses, self._refused = self._refused, []
        for entry in sorted(self._complete, key=self._turn):
            self._drop(entry)
            responses.append(self._release(entry))
        self._complete.clear()
        lock = self._lock(earnest, responses) if self._latch.watching else ()
        self._forget()
        return Plan(
            sequence=self._sequence,
            hits=mask(hits),
            voids=mask(voids),
            responses=tuple(responses),
            fusion_bytes=self._fusion_bytes,
            lock=lock,
            unlock=self._latch.tell(),
        )

    def waiting(self, rank: int) -> list[Waiting]:
        """Lists what a rank has announced and others have not."""
        found = []
        for entry in [entry for sets in self._table.values() for entry in sets.values() if rank in entry.by_rank]:
            missing = tuple(peer for peer in entry.members or self._world if peer not in entry.by_rank)
            found.append(Waiting(entry.name, entry.by_rank[rank].request.kind.name.lower(), missing))
        for slot in bits(self._announced[rank]):
            request = self._cache.request(slot)
            missing = tuple(r for r in request.members or self._world if not self._announced[r] >> slot & 1)
            found.append(Waiting(request.name, request.kind.name.lower(), missing))
        return found

    def _known(self, rank: int, slot: int, *, filler: bool) -> Announcement:
        """Spells out what a rank's bit means."""
        return Announcement(self._cache.request(slot), self._sites[slot].get(rank, ""), filler)

    def _lock(self, hits: int, responses: list[Response]) -> tuple[Slots, ...]:
        """Locks the buckets of a step that has come often enough; every rank takes back what it has announced of it.

        Not while a rank has yet to be told of a failure that the others know: they would count different rounds.
        """
        known = [Response(self._cache.request(slot), slot=slot) for slot in bits(hits & self._slots_of.get((), 0))]
        groups = [
            part
            for group in buckets(known, fusion_bytes=self._fusion_bytes)
            if group[0].request.kind is Kind.ALLREDUCE
            for part in _lines(group)
        ]
        found = tuple(self._latch.observe(groups, [response.slot for response in responses if response.slot >= 0]))
        if not found or len(found) > _MOST_LINES or self._poisoned or self._left:
            return ()
        slots = functools.reduce(operator.or_, (1 << slot for group in found for slot in group))
        names = frozenset(self._cache.request(slot).name for slot in bits(slots))
        self._latch.close(self._sequence, slots, names)
        for rank in self._world:
            self._announced[rank] &= ~slots
            self._filled[rank] &= ~slots
        for name in names:
            self._table.pop(name, None)
        return found

    def _enter(self, rank: int, announcement: Announcement, seen: int) -> None:
        """Puts one announcement where it is counted: among the bits, or into the table."""
        request = announcement.request
        slot = self._cache.slot_of(request.name)
        known = slot >= 0 and self._cache.slot(request) == slot
        if known:
            # The rank has not yet seen the plan that cached its tensor, or announces it from another line.
            self._sites[slot][rank] = announcement.site
        if self._latch.overtakes(request.name, seen) or self._owed(rank, request):
            return
        if slot >= 0 and not self._left and request.name not in self._table:
            if known:
                self._announced[rank] |= 1 << slot
                self._filled[rank] |= announcement.filler << slot
                return
            self._spell_out(slot)
        entry = self._entry(request)
        self._count(entry, rank, announcement)
        if not self._settled(entry):
            self._compare_sets(rank, entry)

    def _entry(self, request: Request) -> _Entry:
        sets = self._table.setdefault(request.name, {})
        return sets.setdefault(request.members, _Entry(request.name, request.members))

    def _count(self, entry: _Entry, rank: int, announcement: Announcement) -> None:
        self._heard[rank] += 1
        entry.by_rank[rank] = announcement
        if rank == (entry.members or self._world)[0]:
            entry.turn = self._heard[rank]

    def _turn(self, entry: _Entry) -> tuple[int, int]:
        """The place in a plan: what is known comes as if its bits had been counted, whenever they were spelled out."""
        lowest = (entry.members or self._world)[0]
        slot = self._cache.slot(entry.by_rank[lowest].request)
        return (-1, slot) if slot >= 0 else (lowest, entry.turn)

    def _drop(self, entry: _Entry) -> None:
        sets = self._table[entry.name]
        del sets[entry.members]
        if not sets:
            del self._table[entry.name]

    def _settled(self, entry: _Entry) -> bool:
        """Marks an entry ready when all have announced it, and fails it when one never will; says whether it did."""
        members = entry.members or self._world
        if len(entry.by_rank) == len(members):
            self._complete.append(entry)
        elif gone := tuple(rank for rank in members if rank in self._left):
            self._drop(entry)
            ranks = tuple(sorted(entry.by_rank))
            request = entry.by_rank[ranks[0]].request
            self._refused.append(Response(request, left=gone, recipients=ranks))
        else:
            return False
        return True

    def _compare_sets(self, rank: int, entry: _Entry) -> None:
        """Fails a name that two ranks have announced for different process sets to which both belong."""
        for other in self._table[entry.name].values():
            opposed = other is not entry and rank in (other.members or self._world)
            if opposed and any(peer in (entry.members or self._world) for peer in other.by_rank):
                self._poison(entry, other)
                return

    def _poison(self, *entries: _Entry) -> None:
        """Fails contradicting entries, now for those who have announced and later for those who will."""
        told: dict[int, Announcement] = {}
        members: set[int] = set()
        values: list[tuple[str, list[int], list[str]]] = []
        for entry in entries:
            self._drop(entry)
            told |= entry.by_rank
            members |= {*(entry.members or self._world)}
            values.append((f"({spans(entry.members or self._world)})", sorted(entry.by_rank), sites(entry.by_rank)))
        error = str(MismatchError(entries[0].name, "process set", sorted(values, key=operator.itemgetter(1))))
        request = told[min(told)].request
        refusal = Response(request, error=error, attribute="process set", recipients=tuple(sorted(told)))
        self._refused.append(refusal)
        for rank in members - set(told):
            owed = self._poisoned.setdefault((entries[0].name, rank), deque())
            owed.append(_Owed(refusal, frozenset(self._left)))

    def _owed(self, rank: int, request: Request) -> bool:
        """Fails an announcement that would have contradicted one of those that were failed before it came."""
        owed = self._poisoned.get((request.name, rank))
        members = {*(request.members or self._world)}
        if owed is None or members.isdisjoint(owed[0].refusal.recipients) or members & owed[0].left:
            return False
        self._refused.append(msgspec.structs.replace(owed.popleft().refusal, recipients=(rank,)))
        if not owed:
            del self._poisoned[request.name, rank]
        return True

    def _release(self, entry: _Entry) -> Response:
        response = verdict(entry.by_rank)
        if not response.error and all(told.filler for told in entry.by_rank.values()):
            return msgspec.structs.replace(response, void=True)
        slot = (
            -1
            if response.error
            else self._cache.place(response.request, pinned=self._announced_by_any() | self._latch.slots)
        )
        if slot < 0:
            return response
        response = msgspec.structs.replace(response, slot=slot)
        gone = self._cache.store(response)
        if gone is not None:
            self._replaced.append(_Former(self._sequence, slot, gone, self._sites[slot]))
            self._slots_of[gone.members] &= ~(1 << slot)
            if not self._slots_of[gone.members]:
                del self._slots_of[gone.members]
        self._slots_of[entry.members] = self._slots_of.get(entry.members, 0) | 1 << slot
        self._sites[slot] = {rank: told.site for rank, told in entry.by_rank.items()}
        return response

    def _ready_slots(self) -> tuple[int, int]:
        """The slots that all members have announced, and those of them that all would only fill up."""
        ready = voids = 0
        for members, cached in self._slots_of.items():
            common = filled = cached
            for rank in members or self._world:
                common &= self._announced[rank]
                filled &= self._filled[rank]
            ready |= common
            voids |= filled
        return ready, voids & ready

    def _announced_by_any(self) -> int:
        return functools.reduce(operator.or_, self._announced)

    def _spelled_out(self) -> int:
        """The slots whose tensors are negotiated by name at present, because a rank differs or has left."""
        if self._left or self._poisoned:
            return -1
        slots = (self._cache.slot_of(name) for name in self._table)
        return functools.reduce(operator.or_, (1 << slot for slot in slots if slot >= 0), 0)

    def _spell_out(self, slot: int) -> None:
        """Moves a cached tensor's announcements into the table, where they can be compared."""
        ranks = [rank for rank in self._world if self._announced[rank] >> slot & 1]
        if not ranks:
            return
        entry = self._entry(self._cache.request(slot))
        for rank in ranks:
            self._count(entry, rank, self._known(rank, slot, filler=bool(self._filled[rank] >> slot & 1)))
            self._announced[rank] &= ~(1 << slot)
            self._filled[rank] &= ~(1 << slot)
        self._settled(entry)

    def _outdated(self, seen: int, hits: int) -> list[_Former]:
        """Finds the hits that mean an older tensor, because the rank had not yet seen its slot change hands."""
        found: dict[int, _Former] = {}
        for former in self._replaced:
            if former.sequence > seen and hits >> former.slot & 1:
                found.setdefault(former.slot, former)
        return list(found.values())

    def _forget(self) -> None:
        """Drops what no report can refer to any more."""
        oldest = min(self._seen)
        while self._replaced and self._replaced[0].sequence <= oldest:
            self._replaced.popleft()
        self._latch.forget(oldest)
