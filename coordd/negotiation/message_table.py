"""The coordinator's negotiation: from the tensors that each rank has announced to the plans of all ranks.

Pure: no thread, clock or socket. Reports go in, plans come out; the order of a plan depends on the order of the reports
only where it must, and every rank carries out the same sequence of plans.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from coordd.errors import MismatchError, ranks_text, spans
from coordd.negotiation.absence import Absence
from coordd.negotiation.ballot import Ballot, lowest, members_mask
from coordd.negotiation.coordinator_lock import MOST_LINES, Latch, lines
from coordd.negotiation.cycle_detector import Slots
from coordd.negotiation.deadlock import BlockedRanks, Wait, deadlock_text, deadlocked, members_of
from coordd.negotiation.fusion import buckets
from coordd.negotiation.group_names import covers, is_group
from coordd.negotiation.leavers import Leavers
from coordd.negotiation.pending_errors import Owed
from coordd.negotiation.rejections import Refusals, RefusedParts, answer
from coordd.negotiation.response_cache import ResponseCache
from coordd.negotiation.roll import Roll
from coordd.negotiation.validation import sites, verdict
from coordd.negotiation.wire import bits, mask
from coordd.ops.messages import (
    Announcement,
    Blocked,
    Kind,
    Plan,
    ReduceOp,
    Refused,
    Report,
    Request,
    Response,
    Traffic,
    Unmatched,
    Waiting,
)

__all__ = ["Negotiator"]

Sites = dict[str, int]
"""Where ranks submit a tensor: bit masks of ranks by line of code."""


class _Former(NamedTuple):
    """The tensor that a slot held before the plan ``sequence``, and where the ranks submitted it."""

    sequence: int
    slot: int
    request: Request
    sites: Sites


class Negotiator:
    """The message table: which ranks have announced which tensors.

    A tensor is released when every member of its process set has announced it. Cached tensors are counted as bits; the
    others as ballots by name and process set. When they are released together, the cached ones come first, then the
    others in the order in which the lowest member announced them, regardless of the order in which the reports arrived.

    A voice is a sender of reports: a rank, or an aggregator (foreman) for the ranks below it, which counts them
    together when they report the same.
    """

    def __init__(
        self,
        size: int,
        *,
        cache_capacity: int,
        fusion_bytes: int,
        lock_steps: int = 0,
        voices: Sequence[int] | None = None,
    ) -> None:
        """Starts with an empty table.

        Args:
            size: number of ranks.
            cache_capacity: slots of the cache.
            fusion_bytes: the size of buckets that the plans request.
            lock_steps: equal steps that lock the plan; 0 for never.
            voices: for each voice the bit mask of the ranks that it reports for; by default one voice for each rank.
        """
        self._everybody = (1 << size) - 1
        self._voices = [1 << rank for rank in range(size)] if voices is None else voices
        self._latch = Latch(lock_steps)
        self._fusion_bytes = fusion_bytes
        self._sequence = 0
        self._cache = ResponseCache(cache_capacity)
        self._roll = Roll()
        self._slots_of: dict[tuple[int, ...], int] = {}
        self._sites: dict[int, Sites] = {}
        self._table: dict[str, dict[tuple[int, ...], Ballot]] = {}
        self._complete: list[Ballot] = []
        self._refused: list[Response] = []
        self._unmatched: list[Unmatched] = []
        self.leavers = Leavers()
        self._owed = Owed()
        self._refusals = Refusals()
        self._parts = RefusedParts(self._everybody)
        self._restarts: deque[tuple[int, int]] = deque()  # plans by which ranks got errors, latest first
        self._unflushed: dict[int, int] = {}  # by plan, the ranks that have yet to acknowledge it
        self._blocked = BlockedRanks()
        self._replaced: deque[_Former] = deque()
        self._seen = [0] * len(self._voices)
        self._heard = [0] * len(self._voices)
        self._left = 0
        self._absence = Absence()

    @property
    def finished(self) -> bool:
        """Whether every rank has left."""
        return self._left == self._everybody

    @property
    def unlocking(self) -> bool:
        """Whether a lock has ended and the next plan has to announce it."""
        return self._latch.ended != 0

    def hear(self, voice: int, report: Report) -> None:
        """Enters the report of a voice."""
        self._seen[voice] = max(self._seen[voice], report.seen if report.floor < 0 else report.floor)
        self._latch.hear(report)
        ranks = int.from_bytes(report.ranks, "little") if report.ranks else self._voices[voice]
        self._blocked.stir(ranks)
        hits = int.from_bytes(report.hits, "little")
        if hits:
            fillers = int.from_bytes(report.fillers, "little")
            for former in self._outdated(report.seen, hits):
                hits &= ~(1 << former.slot)
                self._enter_known(voice, ranks, former, report.seen, filler=bool(fillers >> former.slot & 1))
            hits &= ~self._latch.overtaken(report.seen)
            for slot in bits(hits & self._spelled_out()):
                hits &= ~(1 << slot)
                self._enter_known(voice, ranks, self._current(slot), report.seen, filler=bool(fillers >> slot & 1))
            self._roll.enter(ranks, hits, fillers)
        for announcement in report.fresh:
            self._enter(voice, ranks, announcement, report.seen)

    def leave(self, ranks: int, traffic: Traffic | None = None) -> None:
        """Records that ranks announce nothing more; operations that need them fail.

        Args:
            ranks: their bit mask.
            traffic: their messages, if there are any.
        """
        self._left |= ranks
        self.leavers.leave(ranks, traffic or Traffic())
        self._refusals.leave(ranks)
        self._parts.leave(ranks, self._everybody)
        for plan in [*self._unflushed]:
            self.acknowledge(ranks, plan)
        self._settle_all()

    def acknowledge(self, ranks: int, plan: int) -> None:
        """Records that ranks have announced all that they submitted before they carried out a plan, or have left.

        Args:
            ranks: their bit mask.
            plan: its number.
        """
        self._parts.acknowledge(ranks, plan)
        self._owed.acknowledge(ranks, plan)
        self._unflushed[plan] = self._unflushed.get(plan, 0) & ~ranks
        if not self._unflushed[plan]:
            del self._unflushed[plan]
            self._restarts = deque(each for each in self._restarts if each[0] != plan)

    def refuse(self, refused: Refused) -> None:
        """Fails a collective call or operations that a rank has refused, including later announcements of them.

        Args:
            refused: the refusal.
        """
        self._latch.end()  # the rank may have refused before it knew of the lock, and then has not broken it
        for name in refused.names:
            self._refuse_part(refused, name)
        if refused.names or not self._refusals.enter(refused, self._mask(refused.members), self._left):
            return
        for slot in bits(self._announced_by_any()):
            if self._cache.request(slot).call == refused.call:
                self._spell_out(slot)
        for entry in [entry for sets in self._table.values() for entry in sets.values()]:
            request = entry.first.request
            if request.call == refused.call and entry not in self._complete:
                self._drop(entry)
                self._refused.append(answer(refused, request, entry.told))

    def _refuse_part(self, refused: Refused, name: str) -> None:
        """Fails an operation after a rank has refused its part, for ranks that have announced it or will."""
        rank, wanted = 1 << refused.rank, self._mask(refused.members)
        if self._parts.claim(name, refused.members, rank):  # another rank had refused it before
            return
        if self._owed and self._owed.discharge(refused.rank, name, wanted):
            return
        for slot in self._slots_of_refused(name):
            self._spell_out(slot)
        names = [each for each in self._table if covers(name, each)] if is_group(name) else [name]
        entries = [sets[refused.members] for each in names if refused.members in (sets := self._table.get(each, {}))]
        gone = self._left | self._absence.of(wanted)
        if rank & functools.reduce(operator.or_, (entry.told for entry in entries), gone):
            return
        for entry in entries:
            self._drop_unfinished(entry)
            self._refused.append(answer(refused, entry.first.request, entry.told))
        told = {entry.name: entry.told for entry in entries}
        over, before = self._restarted_since(rank)
        self._parts.enter(refused, name, wanted, wanted & ~(gone | rank | over), told, before=before)
        for entry in [entry for each in names for entry in self._table.get(each, {}).values()]:
            self._refuse_elsewhere(entry.name, entry.members, entry.told)

    def _restarted_since(self, rank: int) -> tuple[int, dict[int, int]]:
        """Returns the ranks that restarted after an error that ``rank``, a bit mask, had not got when it refused.

        Returns:
            the ranks that have acknowledged the plan with that error, as a bit mask; and the plan, for the others.
        """
        over, before = 0, dict[int, int]()
        for plan, ranks in self._restarts:
            if (unflushed := self._unflushed.get(plan, 0)) & rank:
                over |= ranks & ~unflushed
                before |= dict.fromkeys(bits(ranks & unflushed), plan)
        return over, before

    def _refuse_elsewhere(self, name: str, members: tuple[int, ...], told: int) -> None:
        """Rejects an operation also with the process set with which other ranks announce it.

        The refusing rank names another set, to which those ranks belong as well, and will announce it with none.

        Args:
            name: of the operation.
            members: the set with which it is announced.
            told: bit mask of the ranks that have announced it.
        """
        if (found := self._parts.take_over(name, members, self._mask(members), told)) is not None:
            refused, said = found
            self._refuse_part(msgspec.structs.replace(refused, members=members), said)

    def _slots_of_refused(self, name: str) -> list[int]:
        """The slots of an operation, or a group, that a rank refuses."""
        return [self._cache.slot_of(each) for each in self._cache.named(name)]

    def expect(self, ranks: Sequence[int]) -> None:
        """Has the plans announce when one of these ranks leaves; another rank has messages to or from it in flight."""
        self.leavers.ask(ranks)

    def note_blocked(self, ranks: int, blocked: Blocked) -> None:
        """Records for which operation the scripts of ranks, a bit mask, wait, or that they no longer wait."""
        self._blocked.enter(ranks, blocked)
        if blocked.name:
            self._latch.end()  # the ranks that it waits for may wait for its vote on a locked bucket

    def _end_deadlock(self) -> None:
        """Fails the operations of ranks in a deadlock: none will ever submit an operation that the others need."""
        blocked = self._blocked.take()
        waits = [wait for each, ranks in blocked.items() if each.peer < 0 for wait in self._waits(each.name, ranks)]
        messages = [*self._blocked.messages(blocked)]
        if found := deadlocked([*waits, *messages]):
            text = deadlock_text(found)
            failing = [wait for wait in found if wait in messages]
            for ranks, _, waiting, number in failing:
                peer = waiting.missing[0]
                self._unmatched.append(Unmatched(lowest(ranks), waiting.name, peer, number, text))
            self._blocked.enter(members_of(failing), Blocked())  # with that they are no longer blocked
            self._fail_between(members_of(found), text, informed=members_of(failing))

    def _waits(self, name: str, ranks: int) -> Iterator[Wait]:
        """Yields the waits of the ranks among ``ranks`` that have announced an operation."""
        for entry in self._table.get(name, {}).values():
            if told := entry.told & ranks:
                missing = entry.wanted & ~(entry.told | self._absent(entry))
                kind = entry.first.request.kind
                yield Wait(told, missing, Waiting(name, kind.name.lower(), tuple(bits(missing))))
        slot = self._cache.slot_of(name)
        if slot >= 0 and (told := self._roll.ranks(slot)[0]) & ranks:
            request = self._cache.request(slot)
            missing = self._mask(request.members) & ~told
            yield Wait(told & ranks, missing, Waiting(name, request.kind.name.lower(), tuple(bits(missing))))

    def _fail_between(self, ranks: int, error: str, *, informed: int = 0) -> None:
        """Fails the operations that some of these ranks, a bit mask, have announced and others of them have not.

        A rank that gets no error now, because it has announced none of them, gets one when it does. A rank that gets an
        error, and has yet to announce another of these operations, gets an error for that one if it announces it before
        it acknowledges the plan with the errors: its script has not got the error yet. The same holds for ranks that
        are ``informed`` by another error.
        """
        for slot in bits(self._announced_by_any()):
            self._spell_out(slot)
        failing: list[tuple[Ballot, int]] = []
        for entry in [entry for sets in self._table.values() for entry in sets.values()]:
            missing = entry.wanted & ~(entry.told | self._absent(entry))
            if entry.told & ranks and missing & ranks:
                failing.append((entry, missing))
        informed = functools.reduce(operator.or_, (entry.told for entry, _ in failing), informed)
        if informed:
            self._restarts.appendleft((self._sequence + 1, informed))
        self._owed.restart(informed, self._sequence + 1)
        self._parts.restart(informed, self._sequence + 1)
        for entry, missing in failing:
            self._drop_unfinished(entry)
            told = tuple(bits(entry.told))
            text = f"{error}; {entry.name!r} was submitted by {ranks_text(told)} at {', '.join(sites(entry.parts))}"
            plan = self._sequence + 1
            refusal = Response(entry.first.request, error=text, attribute="order", recipients=told, deadlock=plan)
            self._refused.append(refusal)
            for rank in bits(missing & ~self._left):
                self._owed.enter(rank, refusal, self._left, before=plan if informed >> rank & 1 else -1)

    def _end_absence(self, entry: Ballot) -> int:
        """Ends the join of a set; returns the rank that joined last. Its members can block others from now on."""
        self._blocked.stir()
        return self._absence.end(entry.wanted)

    def _settle_all(self) -> None:
        """Evaluates anew every operation that any rank has announced."""
        for slot in bits(self._announced_by_any()):
            self._spell_out(slot)
        for entry in [entry for sets in self._table.values() for entry in sets.values()]:
            if entry not in self._complete:
                self._settled(entry)

    def decide(self) -> Plan | None:
        """Releases every operation that is ready; returns None when there is nothing to send."""
        self._end_deadlock()
        ready, voids = self._ready_slots()
        left = self.leavers.take()
        if not (ready or self._complete or self._refused or self._unmatched or left or self._latch.ended):
            return None
        self._sequence += 1
        hits = ready & ~voids
        earnest = hits & self._roll.earnest
        self._cache.touch(bits(hits))
        self._roll.drop(ready)
        responses, self._refused = self._refused, []
        unmatched, self._unmatched = tuple(self._unmatched), []
        for entry in sorted(self._complete, key=self._turn):
            self._drop(entry)
            responses.append(self._release(entry))
        self._complete.clear()
        lock = self._lock(earnest, responses) if self._latch.watching else ()
        self._forget()
        flush = self._owed.expiring(self._sequence) or self._parts.expiring(self._sequence)
        if flush := flush or any(plan == self._sequence for plan, _ in self._restarts):
            self._unflushed[self._sequence] = self._everybody & ~self._left
        return Plan(
            sequence=self._sequence,
            hits=mask(hits),
            voids=mask(voids),
            responses=tuple(responses),
            fusion_bytes=self._fusion_bytes,
            lock=lock,
            unlock=self._latch.tell(),
            unmatched=unmatched,
            left=left,
            flush=flush,
        )

    def waiting(self, ranks: int) -> list[Waiting]:
        """Lists the operations that some of these ranks, a bit mask, have announced and others have not."""
        found = []
        for entry in [entry for sets in self._table.values() for entry in sets.values() if ranks & entry.told]:
            kind = next(told.request.kind for group, told in entry.parts.items() if group & ranks)
            missing = entry.wanted & ~(entry.told | self._absent(entry))
            found.append(Waiting(entry.name, kind.name.lower(), tuple(bits(missing))))
        for told, _, slots in self._roll:
            for slot in bits(slots if told & ranks else 0):
                request = self._cache.request(slot)
                if (wanted := self._mask(request.members)) & told & ranks:
                    found.append(Waiting(request.name, request.kind.name.lower(), tuple(bits(wanted & ~told))))
        return found

    def _mask(self, members: tuple[int, ...]) -> int:
        return members_mask(members) if members else self._everybody

    def _current(self, slot: int) -> _Former:
        """Returns the current tensor of a slot."""
        return _Former(self._sequence, slot, self._cache.request(slot), self._sites[slot])

    def _enter_known(self, voice: int, ranks: int, known: _Former, seen: int, *, filler: bool) -> None:
        """Enters in the table the announcement behind a bit that ranks have set."""
        for group, announcement in self._known(ranks, known, filler=filler):
            self._enter(voice, group, announcement, seen)

    def _known(self, ranks: int, known: _Former, *, filler: bool) -> list[tuple[int, Announcement]]:
        """Expands a bit into announcements, in groups of ranks that submit the tensor on the same line."""
        ranks &= self._mask(known.request.members)
        found = []
        for site, there in known.sites.items():
            if group := ranks & there:
                found.append((group, Announcement(known.request, site, filler)))
                ranks &= ~group
        return [*found, (ranks, Announcement(known.request, "", filler))] if ranks else found

    def _lock(self, hits: int, responses: list[Response]) -> tuple[Slots, ...]:
        """Locks the buckets of a step that has repeated often enough; every rank takes back its announcements of them.

        No lock is made while a rank still has to receive a failure that the others know: they would count different
        rounds.
        """
        known = [Response(self._cache.request(slot), slot=slot) for slot in bits(hits & self._slots_of.get((), 0))]
        groups = [
            part
            for group in buckets(known, fusion_bytes=self._fusion_bytes)
            if group[0].request.kind is Kind.ALLREDUCE and group[0].request.op is not ReduceOp.ADASUM
            for part in lines(group)
        ]
        found = tuple(self._latch.observe(groups, [response.slot for response in responses if response.slot >= 0]))
        names = frozenset(self._cache.request(slot).name for group in found for slot in group)
        calls = {self._cache.request(slot).call for group in found for slot in group}
        unsettled = self._owed.names & names or any(covers(said, name) for said in self._parts for name in names)
        unsettled = unsettled or any(call in self._refusals for call in calls)
        if not found or len(found) > MOST_LINES or self._left or unsettled:
            return ()
        slots = functools.reduce(operator.or_, (1 << slot for group in found for slot in group))
        self._latch.close(self._sequence, slots, names)
        self._blocked.forget(self._sequence)
        self._roll.drop(slots)
        for name in names:
            self._table.pop(name, None)
        return found

    def _enter(self, voice: int, ranks: int, announcement: Announcement, seen: int) -> None:
        """Counts one announcement: among the bits, or in the table."""
        request = announcement.request
        ranks &= self._mask(request.members)
        slot = self._cache.slot_of(request.name)
        known = slot >= 0 and self._cache.slot(request) == slot
        if known:
            # A rank has not yet seen the plan that cached its tensor, or announces it from another line.
            self._note_site(slot, ranks, announcement.site)
        if self._latch.overtakes(request, seen):
            return
        if (self._owed or self._refusals or self._parts) and not (ranks := self._not_refused(ranks, request)):
            return
        if slot >= 0 and not (self._left or self._absence) and request.name not in self._table:
            if known:
                self._roll.enter(ranks, 1 << slot, announcement.filler << slot)
                return
            self._spell_out(slot)
        entry = self._entry(request)
        self._heard[voice] += 1
        entry.enter(ranks, announcement, turn=self._heard[voice])
        if request.kind is Kind.JOIN:
            self._absence.begin(entry.wanted, ranks)
            self._parts.leave(ranks, entry.wanted)
            self._settle_all()
        elif not self._settled(entry):
            self._compare_sets(ranks, entry)

    def _note_site(self, slot: int, ranks: int, site: str) -> None:
        known = self._sites[slot]
        if known.get(site, 0) & ranks != ranks:
            moved = {other: there & ~ranks for other, there in known.items()}
            moved[site] = moved.get(site, 0) | ranks
            self._sites[slot] = {other: there for other, there in moved.items() if there}

    def _entry(self, request: Request) -> Ballot:
        sets = self._table.setdefault(request.name, {})
        if (entry := sets.get(request.members)) is None:
            entry = sets[request.members] = Ballot(request.name, request.members, self._mask(request.members))
        return entry

    def _turn(self, entry: Ballot) -> tuple[int, int]:
        """Sort key of an entry in a plan: a cached tensor comes where its bits would, even when it was spelled out."""
        slot = self._cache.slot(entry.first.request)
        return (-1, slot) if slot >= 0 else (lowest(entry.wanted), entry.turn)

    def _drop(self, entry: Ballot) -> None:
        sets = self._table[entry.name]
        del sets[entry.members]
        if not sets:
            del self._table[entry.name]

    def _drop_unfinished(self, entry: Ballot) -> None:
        """Drops an entry that fails before all members have announced it; a join that fails has not happened."""
        self._drop(entry)
        if entry.first.request.kind is Kind.JOIN:
            self._end_absence(entry)

    def _settled(self, entry: Ballot) -> bool:
        """Marks an entry ready when all members have announced it, and fails it when one never will.

        Returns:
            whether it did either.
        """
        entry.absent = self._absent(entry)
        if entry.told | entry.absent == entry.wanted:
            self._complete.append(entry)
        elif gone := entry.wanted & self._left:
            self._drop_unfinished(entry)
            ranks = tuple(bits(entry.told))
            self._refused.append(Response(entry.first.request, left=tuple(bits(gone)), recipients=ranks))
        else:
            return False
        return True

    def _absent(self, entry: Ballot) -> int:
        """Returns the members that have joined instead of announcing the entry; a join itself needs all members."""
        return 0 if entry.first.request.kind is Kind.JOIN else self._absence.of(entry.wanted) & ~entry.told

    def _compare_sets(self, ranks: int, entry: Ballot) -> None:
        """Fails a name that two ranks have announced for different process sets to which both belong."""
        for other in self._table[entry.name].values():
            if other is not entry and ranks & other.wanted and other.told & entry.wanted:
                self._poison(entry, other)
                return

    def _poison(self, *entries: Ballot) -> None:
        """Fails contradicting entries, now for the ranks that have announced them and later for the ranks that will."""
        told = members = 0
        values: list[tuple[str, list[int], list[str]]] = []
        for entry in entries:
            self._drop(entry)
            told |= entry.told
            members |= entry.wanted
            values.append((f"({spans(list(bits(entry.wanted)))})", list(bits(entry.told)), sites(entry.parts)))
        error = str(MismatchError(entries[0].name, "process set", sorted(values, key=operator.itemgetter(1))))
        request = min(entries, key=lambda entry: lowest(entry.told)).first.request
        refusal = Response(request, error=error, attribute="process set", recipients=tuple(bits(told)))
        self._refused.append(refusal)
        for rank in bits(members & ~told):
            self._owed.enter(rank, refusal, self._left)

    def _not_refused(self, ranks: int, request: Request) -> int:
        """Fails announcements of refused operations, or that contradict an operation that failed before they came.

        Args:
            ranks: bit mask of the ranks that announce.
            request: the announced request.

        Returns:
            the other ranks.
        """
        if request.call in self._refusals:
            self._refused.append(self._refusals.response(request, ranks))
            return 0
        ranks = self._claim_refusals(ranks, request)
        if self._parts and ranks:
            before = self._table.get(request.name, {}).get(request.members)
            self._refuse_elsewhere(request.name, request.members, ranks | (before.told if before else 0))
            ranks = self._claim_refusals(ranks, request)
        members = self._mask(request.members)
        for rank in bits(ranks):
            if (refusal := self._owed.claim(rank, request.name, members)) is not None:
                self._refused.append(refusal)
                self._parts.inform(1 << rank if refusal.deadlock >= 0 else 0)
                ranks &= ~(1 << rank)
        return ranks

    def _claim_refusals(self, ranks: int, request: Request) -> int:
        """Fails announcements of operations that a rank has refused; returns the other ranks."""
        for refused, concerned in self._parts.claim(request.name, request.members, ranks):
            self._refused.append(answer(refused, request, concerned))
            ranks &= ~concerned
        return ranks

    def _release(self, entry: Ballot) -> Response:
        response = verdict(entry.parts, entry.absent)
        if response.request.kind is Kind.JOIN and not response.error:
            last = self._end_absence(entry)
            self._owed.forget(entry.wanted, self._everybody)
            self._parts.note_met(entry.wanted)
            return msgspec.structs.replace(response, request=msgspec.structs.replace(response.request, root=last))
        if response.request.kind is Kind.BARRIER and not response.error:
            self._owed.meet(entry.wanted & ~entry.absent, self._sequence)
            self._parts.meet(entry.wanted & ~entry.absent, self._sequence)
        if not response.error and all(told.filler for told in entry.parts.values()):
            return msgspec.structs.replace(response, void=True)
        pinned = self._announced_by_any() | self._latch.slots
        slot = -1 if response.error else self._cache.place(response.request, pinned=pinned)
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
        there = self._sites[slot] = {}
        for ranks, told in entry.parts.items():
            there[told.site] = there.get(told.site, 0) | ranks
        return response

    def _ready_slots(self) -> tuple[int, int]:
        """Returns the slots that all members have announced, and those of them for which all have only fillers."""
        ready = 0
        for members, cached in self._slots_of.items():
            ready |= self._roll.complete(cached, self._mask(members))
        return ready, ready & self._roll.void

    def _announced_by_any(self) -> int:
        return self._roll.slots

    def _spelled_out(self) -> int:
        """Returns the slots whose tensors are negotiated by name at present, because a rank differs or has left."""
        if self._left or self._owed or self._absence or self._refusals:
            return -1
        slots = [self._cache.slot_of(name) for name in self._table]
        slots += [slot for name in self._parts for slot in self._slots_of_refused(name)]
        return functools.reduce(operator.or_, (1 << slot for slot in slots if slot >= 0), 0)

    def _spell_out(self, slot: int) -> None:
        """Moves a cached tensor's announcements into the table, where they can be compared."""
        told, filled = self._roll.ranks(slot)
        if not told:
            return
        entry = self._entry(self._cache.request(slot))
        for ranks in (told & ~filled, filled):
            for group, announcement in self._known(ranks, self._current(slot), filler=ranks == filled):
                entry.enter(group, announcement)
        self._roll.drop(1 << slot)
        self._settled(entry)

    def _outdated(self, seen: int, hits: int) -> list[_Former]:
        """Finds the hits that mean an older tensor: the rank had not yet seen the plan that reassigns the slot."""
        found: dict[int, _Former] = {}
        for former in self._replaced:
            if former.sequence > seen and hits >> former.slot & 1:
                found.setdefault(former.slot, former)
        return list(found.values())

    def _forget(self) -> None:
        """Drops state that no report can refer to any more."""
        oldest = min(self._seen)
        while self._replaced and self._replaced[0].sequence <= oldest:
            self._replaced.popleft()
        self._latch.forget(oldest)
