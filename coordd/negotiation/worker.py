"""The worker: one rank's side of the protocol, from submitted tensors to buckets for the data plane.

Pure: no thread, clock or socket. The same object runs in every daemon and in the simulator.

Every method returns what is `Due`. While a locked plan is in force, its tensors are not reported: a complete bucket
starts with this rank's vote (`Locked`). The data plane matches the votes of all ranks under ``(lock, index,
occurrence)`` before any data moves, and reports the outcome of each valid vote: `landed` once the data has moved,
`refused` if any rank's vote was invalid, in which case the arrays are untouched. A vote without a bucket is invalid; it
must reach the other ranks, and has no outcome here. Votes come in no common order, so none may wait for another's
outcome, except that votes on a bucket wait until the buckets with its index in older locks have ended.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import msgspec

from coordd.errors import CoorddError, MismatchError, RefusedError, ShutdownError
from coordd.negotiation.bucket import Bucket, Locked
from coordd.negotiation.deadlock import Heard, HeardDeadlocks
from coordd.negotiation.fusion import buckets
from coordd.negotiation.locked_plan import Lock
from coordd.negotiation.response_cache import ResponseCache
from coordd.negotiation.sequence_numbers import Numbering
from coordd.negotiation.stand_in import stand_in
from coordd.negotiation.tensor_table import Entry, TensorTable, announced
from coordd.negotiation.wire import bits
from coordd.ops.messages import SILENT_PLANS, Flushed, Kind, Plan, Refused, Report, Response

__all__ = ["Bucket", "Due", "Locked", "Member"]


class Due(msgspec.Struct, frozen=True):
    """What a rank has to do now.

    ``messages`` to send, in this order; negotiated ``buckets``, to start in this order; and votes (``words``), to give
    at once.
    """

    messages: list[Report | Flushed | Refused] = []
    buckets: list[Bucket] = []
    words: list[Locked] = []


class Member:
    """Announces tensors, follows plans, and keeps its response cache equal to that of all ranks."""

    def __init__(self, rank: int, *, cache_capacity: int, numbering: Numbering | None = None) -> None:
        """Starts with nothing announced.

        Args:
            rank: this rank.
            cache_capacity: slots of the response cache; equal on all ranks.
            numbering: numbers the buckets; equal on all ranks.
        """
        self.rank = rank
        self.table = TensorTable()
        self._cache = ResponseCache(cache_capacity)
        self._seen = 0
        self._reported = 0
        self._numbering = numbering or Numbering()
        self._lock: Lock | None = None
        self._locks: dict[int, Lock] = {}
        self._untold: list[Entry] = []
        self._words: list[Locked] = []
        self._deferred: list[Locked] = []  # votes that wait for the end of an older lock's bucket with the same index
        self.hits = self.misses = 0
        """How many announced tensors were cached, and how many were spelled out."""
        self._unlock: tuple[int, int] | None = None
        self._flushes: list[int] = []  # plans to acknowledge
        self._later: list[Entry | Refused] = []  # what follows an acknowledgement that waits for open votes
        self._left = False
        self._joined: set[tuple[int, ...]] = set()
        self._joining: list[Entry] = []
        self._refused_names: set[str] = set()
        self._refused_calls: dict[str, Refused] = {}
        self.stopped = False
        self.deadlocks = HeardDeadlocks()

    @property
    def seen(self) -> int:
        """The last plan that was carried out."""
        return self._seen

    @property
    def lock(self) -> Lock | None:
        """The locked plan, if one is in force."""
        return self._lock

    def announce(self, entries: Iterable[Entry]) -> Due:
        """Takes in new tensors."""
        for entry in self.table.admit(entries):
            if self.deadlocks.missed and (failed := self.deadlocks.claim(entry.request)) is not None:
                self._fail(entry, failed)
            elif self._flushes and self._settled():
                self._later.append(entry)
            else:
                self._sort(entry)
        return self._due()

    def follow(self, plan: Plan) -> Due:
        """Turns a plan into buckets; entries that the plan rejects fail here."""
        self._seen = plan.sequence
        self.stopped = self.stopped or plan.stop
        slots = list(bits(int.from_bytes(plan.hits, "little")))
        agreed = [Response(self._cache.request(slot), slot=slot) for slot in slots]
        for slot in bits(int.from_bytes(plan.voids, "little")):
            self._void(Response(self._cache.request(slot)))
        self.deadlocks.note(self.rank, plan)
        for response in plan.responses:
            if response.recipients:
                self._refuse(response)
                continue
            if response.void:
                self._void(response)
                continue
            agreed.append(response)
            if response.slot >= 0:
                self._cache.store(response)
        found = self._buckets(agreed, plan.fusion_bytes)
        self._end_joins({response.request.members for response in agreed if response.request.kind is Kind.JOIN})
        if any(bucket.request.kind is Kind.BARRIER for bucket in found):
            self._pass_barrier()
        self._update_lock(plan)
        return self._due(found)

    def _pass_barrier(self) -> None:
        """Settles the deadlocks of which the script has not asked for the error: it continues without."""
        for number in sorted(self.deadlocks.unsettled):
            self.deadlocks.hear(number)

    def settle(self, heard: Heard) -> Due:
        """Records that everything submitted from now on was submitted after the script was notified of a deadlock."""
        self.deadlocks.settle(heard)
        if self._flushes:
            self._break()
        return self._due()

    def awaited(self) -> Due:
        """Records that a thread waits, after everything that was submitted before has been announced.

        The awaited tensor may be held back in a bucket whose other tensors come only later, here or on a rank that
        needs this rank's data first; so a partly filled bucket breaks the lock.
        """
        for entry in self.table:
            entry.awaited = True
        if self._lock is not None and self._lock.partial:
            self._break()
        return self._due()

    def unlock(self) -> Due:
        """Breaks the lock, if any: held tensors are negotiated, so the coordinator knows the missing ranks."""
        self._break()
        return self._due()

    def refuse(self, refused: Refused) -> Due:
        """Breaks the lock: this rank will not announce its part of some operations, or of a collective call.

        It also breaks the next lock that has one of these operations: the coordinator may make it before it receives
        this refusal. Tensors of the call that this rank has submitted, and would have to announce anew because a vote
        on them was invalid or a lock takes their announcement back, fail here: the coordinator may have forgotten the
        call by then.
        """
        self._refused_names.update(*map(self._cache.named, refused.names))
        present = {entry.request.call for entry in self.table}
        self._refused_calls = {call: each for call, each in self._refused_calls.items() if call in present}
        if refused.call and refused.call in present:
            self._refused_calls[refused.call] = refused
        return self.unlock()

    def told(self, refused: Refused) -> Refused | None:
        """Returns a refusal as it is sent; None if it is sent later, or the other ranks know already.

        They know of operations that failed in a deadlock, as long as the script has not been informed of the deadlock.
        """
        names = tuple(name for name in refused.names if not self.deadlocks.claim_refused(name, refused.members))
        if refused.names and not names:
            return None
        told = msgspec.structs.replace(refused, names=names)
        if self._settled():
            self._later.append(told)
            return None
        return told

    def _fail_refused(self, entries: Iterable[Entry]) -> list[Entry]:
        """Fails the entries of a call that this rank has refused; returns the rest."""
        kept = []
        for entry in entries:
            if (refused := self._refused_calls.get(entry.request.call)) is None:
                kept.append(entry)
            else:
                self.table.take(entry.request.name).handle.fail(RefusedError(self.rank, refused.reason))
        return kept

    def leave(self) -> Due:
        """Stops announcing; the result must be carried out before the goodbye.

        Tensors that would have to be announced later fail, as they would fail on the ranks that wait for them.
        """
        self._break()
        due = self._due()
        self._left = True
        return due

    def landed(self, locked: Locked) -> Due:
        """Records that a locked bucket has completed; its entries leave the table like those of any bucket."""
        lock = self._locks[locked.lock]
        if (word := lock.land(locked)) is not None:
            self._give(word)
        self._forget(lock)
        self._give_deferred()
        self._join()
        return self._due()

    def refused(self, locked: Locked) -> Due:
        """Records that a rank's vote was invalid: breaks the lock, and announces the tensors that did not move."""
        lock = self._locks[locked.lock]
        lock.refuse(locked)
        if lock is self._lock:
            self._break()
        self._forget(lock)
        self._give_deferred()
        self._untold += self._fail_refused(locked.bucket.entries if locked.bucket is not None else ())
        self._join()
        return self._due()

    def _due(self, found: list[Bucket] | None = None) -> Due:
        """Collects the messages, the buckets and the votes."""
        report = self._report()
        messages: list[Report | Flushed | Refused] = [] if report is None else [report]
        if self._flushes and not self._locks:
            messages += self._acknowledge()
        words, self._words = self._words, []
        return Due(messages, found or [], words)

    def _settled(self) -> list[int]:
        """Returns the plans that can be acknowledged: the script has got their errors."""
        return [plan for plan in self._flushes if plan not in self.deadlocks.unsettled]

    def _acknowledge(self) -> Iterator[Report | Flushed | Refused]:
        """Yields the acknowledgements, and then what this rank has submitted and refused since.

        Only while no vote is open: tensors voted on may yet have to be announced before.
        """
        settled = self._settled()
        self._flushes = [plan for plan in self._flushes if plan not in settled]
        if not self._left:
            yield from (Flushed(self.rank, plan) for plan in settled)
        later, self._later = self._later, []
        for item in later:
            if isinstance(item, Entry):
                self._sort(item)
            else:
                yield from self._reports()
                yield from () if self._left else (item,)
        yield from self._reports()

    def _reports(self) -> Iterator[Report]:
        if (report := self._report()) is not None:
            yield report

    def _report(self) -> Report | None:
        untold, self._untold = self._untold, []
        unlock, self._unlock = self._unlock, None
        if self._left:
            for entry in untold:
                self.table.take(entry.request.name).handle.fail(ShutdownError(entry.request.name, (self.rank,)))
            untold, unlock = [], None
        report = announced(untold, self._cache, seen=self._seen)
        if report is not None:
            self.hits += int.from_bytes(report.hits, "little").bit_count()
            self.misses += len(report.fresh)
        if unlock is not None:
            number, lasted = unlock
            report = msgspec.structs.replace(report or Report(self._seen), unlock=number, lasted=lasted)
        if report is None and self._seen - self._reported >= SILENT_PLANS:
            # An empty report, so that the coordinator can forget what older reports might have referred to.
            report = Report(self._seen)
        if report is not None:
            self._reported = self._seen
        return report

    def _sort(self, entry: Entry) -> None:
        """Gathers locked tensors, and queues the rest for announcement; a contradiction breaks the lock."""
        if entry.request.kind is Kind.JOIN:
            self._joined.add(entry.request.members)
            self._break()
            self._joining.append(entry)
            self._join()
            return
        lock = self._lock
        if lock is not None and (slot := self._cache.slot_of(entry.request.name)) in lock:
            if not entry.filler and self._cache.slot(entry.request) == slot:
                if (word := lock.gather(slot, entry)) is not None:
                    self._give(word)
                return
            self._break()
        self._untold.append(entry)

    def _join(self) -> None:
        """Announces pending joins once no vote is open: tensors voted on may yet have to be announced before."""
        if not self._locks:
            self._untold += self._joining
            self._joining = []

    def _end_joins(self, sets: set[tuple[int, ...]]) -> None:
        """Records that all members of these process sets have joined, and continue with the same counts."""
        self._joined -= sets
        for members in sets:
            self.deadlocks.forget(members)

    def _update_lock(self, plan: Plan) -> None:
        """Ends or begins a lock as a plan says."""
        if self._lock is not None and self._lock.number == plan.unlock:
            self._break()
            self._unlock = None  # the coordinator knows
        if plan.lock:
            self._enter(Lock(plan.sequence, plan.lock))
        if plan.flush:
            self._flushes.append(plan.sequence)
            self._break()  # what a lock holds has not been announced

    def _enter(self, lock: Lock) -> None:
        """Begins a lock: its tensors that are announced and not released count as submitted just now.

        So do joins, which this rank has announced after them.
        """
        self._lock = self._locks[lock.number] = lock
        pending = [entry for entry in self.table if not entry.released and entry not in self._later]
        self._joining = [entry for entry in pending if entry.request.kind is Kind.JOIN]
        names = {self._cache.request(slot).name for slot in lock.slots}
        if refused := self._refused_names & names:
            # Tensors that this rank has submitted since do not match the other ranks' announcements.
            self._refused_names -= refused
            self._break()
        taken_back = [entry for entry in pending if entry.request.name in names]
        for entry in self._fail_refused(taken_back) if self._refused_calls else taken_back:
            self._sort(entry)
        # A thread that began to wait before the lock is not reported again.
        waited = lock.partial and any(entry.awaited and not entry.released for entry in self.table)
        if waited or self._left or self._joined or self._settled():
            self._break()
        self._join()

    def _break(self) -> None:
        """Ends the lock on this rank; iterations on which it has voted go on."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._unlock = (lock.number, lock.lasted)
            words, entries = lock.dissolve()
            for word in words:
                self._give(word)
            self._untold += entries
            self._forget(lock)

    def _give(self, word: Locked) -> None:
        """Gives a vote, after all votes on the buckets that have the same index in older locks.

        Locked buckets with the same index use the same slot and tags, where the order must be the same on all ranks.
        An older lock's bucket in flight may still need an invalid vote on its next iteration.
        """
        older = any(lock.number < word.lock and lock.is_flying(word.index) for lock in self._locks.values())
        (self._deferred if older else self._words).append(word)

    def _give_deferred(self) -> None:
        """Gives the votes that no longer have to wait."""
        if self._deferred:
            deferred, self._deferred = self._deferred, []
            for word in deferred:
                self._give(word)

    def _forget(self, lock: Lock) -> None:
        if lock is not self._lock and not lock.flying:
            self._locks.pop(lock.number, None)

    def _buckets(self, agreed: list[Response], fusion_bytes: int) -> list[Bucket]:
        """Builds the buckets to which this rank belongs; every rank numbers all buckets, so that the numbers agree."""
        found = []
        for group in buckets(agreed, fusion_bytes=fusion_bytes):
            members = group[0].request.members
            sequence, slot = self._numbering.next(members)
            if not members or self.rank in members:
                entries = tuple(self._entry(response) for response in group)
                for place, entry in enumerate(entries):
                    entry.turn = (sequence, place)
                first = group[0]
                found.append(Bucket(sequence, first.request, first.sizes, entries, len(first.absent), slot))
        return found

    def _entry(self, response: Response) -> Entry:
        if self.rank in response.absent:
            return stand_in(response.request)
        entry = self.table.find(response.request.name)
        entry.released = True
        if response.slot >= 0:
            self._cache.adopt(response.slot, entry.request, entry.site)
        return entry

    def _void(self, response: Response) -> None:
        """Ends a filler: no rank had data for it."""
        request = response.request
        if (not request.members or self.rank in request.members) and self.rank not in response.absent:
            self.table.take(request.name).handle.resolve(None)

    def _refuse(self, response: Response) -> None:
        if self.rank not in response.recipients:
            return
        self._fail(self.table.find(response.request.name), response)

    def _fail(self, entry: Entry, response: Response) -> None:
        """Fails an entry with the error in a plan."""
        self.table.take(entry.request.name)
        if entry.request.kind is Kind.JOIN:
            self._joined.discard(entry.request.members)
        error = _error(entry.request.name, response)
        if isinstance(error, MismatchError) and response.deadlock >= 0:
            error.when_heard = functools.partial(self.deadlocks.hear, response.deadlock)
        entry.handle.fail(error)


def _error(name: str, response: Response) -> CoorddError:
    """Creates the error of an operation that a plan rejects."""
    if response.left:
        return ShutdownError(name, response.left)
    if response.refuser >= 0:
        return RefusedError(response.refuser, response.error)
    return MismatchError.told(name, response.attribute, response.error)
