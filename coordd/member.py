"""One rank's side of the protocol: from what the framework submits to what the data plane carries out.

Pure: no thread, clock or socket. The same object runs in every daemon and in the simulator.

Every method returns what is `Due`. With a locked plan in force, what it holds is not reported: a complete bucket starts
with this rank's *word* (`Locked`). The data plane has the words of all ranks meet under ``(lock, index, occurrence)``
before any data moves, and tells the outcome of each word that was valid: `landed` once the data has moved, `refused`
if any rank's word was invalid, in which case it has not touched the arrays. A word without a bucket is invalid; it must
reach the other ranks, and has no outcome here. Words come in no common order, so none may wait for another's outcome.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec

from coordd.bucket import Bucket, Locked
from coordd.cache import ResponseCache
from coordd.deadlock import HeardDeadlocks
from coordd.errors import CoorddError, MismatchError, RefusedError, ShutdownError
from coordd.fusion import buckets
from coordd.lock import Lock
from coordd.messages import SILENT_PLANS, Kind, Plan, Refused, Report, Response
from coordd.numbering import Numbering
from coordd.stand_in import stand_in
from coordd.table import Entry, TensorTable, announced
from coordd.wire import bits

__all__ = ["Bucket", "Due", "Locked", "Member"]


class Due(msgspec.Struct, frozen=True):
    """What a rank has to do now.

    A report to send if there is one, negotiated ``buckets`` to start in this order, and ``words`` to give at once.
    """

    report: Report | None = None
    buckets: list[Bucket] = []
    words: list[Locked] = []


class Member:
    """Announces tensors, follows plans, and keeps its cache equal to everybody's."""

    def __init__(self, rank: int, *, cache_capacity: int, numbering: Numbering | None = None) -> None:
        """Starts with nothing announced.

        Args:
            rank: this rank.
            cache_capacity: how many tensors are known by a number; equal on all ranks.
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
        self.hits = self.misses = 0
        """How many tensors were announced that all ranks knew, and how many were spelled out."""
        self._unlock: tuple[int, int] | None = None
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
        """Takes new tensors in."""
        for entry in self.table.admit(entries):
            if self.deadlocks.missed and (failed := self.deadlocks.claim(entry.request)) is not None:
                self._fail(entry, failed)
            else:
                self._sort(entry)
        return self._due()

    def follow(self, plan: Plan) -> Due:
        """Carries a plan over into buckets; entries that the plan refuses fail here."""
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
        if self._lock is not None and self._lock.number == plan.unlock:
            self._break()
            self._unlock = None  # the coordinator knows
        if plan.lock:
            self._enter(Lock(plan.sequence, plan.lock))
        return self._due(found)

    def awaited(self) -> Due:
        """Notes that somebody waits, after all that was submitted before has been announced.

        What he waits for may be held back in a bucket whose other tensors come only later, here or on a rank that needs
        our data first; so a bucket that is partly there breaks the lock.
        """
        for entry in self.table:
            entry.awaited = True
        if self._lock is not None and self._lock.partial:
            self._break()
        return self._due()

    def unlock(self) -> Due:
        """Breaks the lock, if there is one: what waits is negotiated, so that the coordinator knows who is missing."""
        self._break()
        return self._due()

    def refuse(self, refused: Refused) -> Due:
        """Breaks the lock: this rank will not announce its part of some operations, or of a collective call.

        It breaks also the next lock that has one of these operations: the coordinator may make it before it hears of
        this. What this rank has submitted of the call, and would have to announce anew, because a word on it was
        invalid or a lock takes its announcement back, fails here: the coordinator may have forgotten the call by then.
        """
        self._refused_names.update(*map(self._cache.named, refused.names))
        present = {entry.request.call for entry in self.table}
        self._refused_calls = {call: each for call, each in self._refused_calls.items() if call in present}
        if refused.call and refused.call in present:
            self._refused_calls[refused.call] = refused
        return self.unlock()

    def told(self, refused: Refused) -> Refused | None:
        """Dates what the others are told of a refusal; None if they know already.

        They do of what has failed because ranks waited for each other, as long as the script has not heard of that.
        """
        names = tuple(name for name in refused.names if not self.deadlocks.claim_refused(name, refused.members))
        known = refused.names and not names
        return None if known else msgspec.structs.replace(refused, names=names, seen=self._seen)

    def _fail_refused(self, entries: Iterable[Entry]) -> list[Entry]:
        """Fails what is part of a call that this rank has refused; returns the rest."""
        kept = []
        for entry in entries:
            if (refused := self._refused_calls.get(entry.request.call)) is None:
                kept.append(entry)
            else:
                self.table.take(entry.request.name).handle.fail(RefusedError(self.rank, refused.reason))
        return kept

    def leave(self) -> Due:
        """Ends the announcing; what is due comes before the goodbye.

        What would have to be announced later fails, as it would fail on the ranks that wait for it.
        """
        self._break()
        due = self._due()
        self._left = True
        return due

    def landed(self, locked: Locked) -> Due:
        """Notes that the data of a locked bucket has arrived; its entries leave the table like those of any bucket."""
        lock = self._locks[locked.lock]
        if (word := lock.land(locked)) is not None:
            self._words.append(word)
        self._forget(lock)
        self._join()
        return self._due()

    def refused(self, locked: Locked) -> Due:
        """Notes that some rank's word was invalid: breaks the lock, and announces what did not move."""
        lock = self._locks[locked.lock]
        lock.refuse(locked)
        if lock is self._lock:
            self._break()
        self._forget(lock)
        self._untold += self._fail_refused(locked.bucket.entries if locked.bucket is not None else ())
        self._join()
        return self._due()

    def _due(self, found: list[Bucket] | None = None) -> Due:
        """Sums up what has come together."""
        report = self._report()
        words, self._words = self._words, []
        return Due(report, found or [], words)

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
            # A sign of life, so that the coordinator can forget what older reports might have referred to.
            report = Report(self._seen)
        if report is not None:
            self._reported = self._seen
        return report

    def _sort(self, entry: Entry) -> None:
        """Gathers what is locked, and has the rest announced; what contradicts the lock breaks it."""
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
                    self._words.append(word)
                return
            self._break()
        self._untold.append(entry)

    def _join(self) -> None:
        """Announces that this rank joins, after all that it has not joined for: words may yet have to be announced."""
        if not self._locks:
            self._untold += self._joining
            self._joining = []

    def _end_joins(self, sets: set[tuple[int, ...]]) -> None:
        """Notes that all members of these process sets have joined, and go on with the same counts."""
        self._joined -= sets
        for members in sets:
            self.deadlocks.forget(members)

    def _enter(self, lock: Lock) -> None:
        """Begins a lock: what this rank has announced of it, and no plan has released, counts as submitted just now.

        So does that it joins, which it has announced after that.
        """
        self._lock = self._locks[lock.number] = lock
        self._joining = [entry for entry in self.table if entry.request.kind is Kind.JOIN and not entry.released]
        names = {self._cache.request(slot).name for slot in lock.slots}
        if refused := self._refused_names & names:
            # What this rank has submitted since is not what the other ranks have announced.
            self._refused_names -= refused
            self._break()
        taken_back = [entry for entry in self.table if entry.request.name in names and not entry.released]
        for entry in self._fail_refused(taken_back) if self._refused_calls else taken_back:
            self._sort(entry)
        # Who began to wait before the lock came does not say so again.
        waited = lock.partial and any(entry.awaited and not entry.released for entry in self.table)
        if waited or self._left or self._joined:
            self._break()
        self._join()

    def _break(self) -> None:
        """Ends the lock on this rank; occurrences on which it has given its word go on."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._unlock = (lock.number, lock.lasted)
            words, entries = lock.dissolve()
            self._words += words
            self._untold += entries
            self._forget(lock)

    def _forget(self, lock: Lock) -> None:
        if lock is not self._lock and not lock.flying:
            self._locks.pop(lock.number, None)

    def _buckets(self, agreed: list[Response], fusion_bytes: int) -> list[Bucket]:
        """The buckets to which this rank belongs; every rank numbers them all, so that the numbers agree."""
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
        """Ends a filler: no rank had anything."""
        request = response.request
        if (not request.members or self.rank in request.members) and self.rank not in response.absent:
            self.table.take(request.name).handle.resolve(None)

    def _refuse(self, response: Response) -> None:
        if self.rank not in response.recipients:
            return
        self._fail(self.table.find(response.request.name), response)

    def _fail(self, entry: Entry, response: Response) -> None:
        """Fails an entry with the error that a plan has told."""
        self.table.take(entry.request.name)
        if entry.request.kind is Kind.JOIN:
            self._joined.discard(entry.request.members)
        error = _error(entry.request.name, response)
        if isinstance(error, MismatchError) and response.deadlock >= 0:
            error.when_heard = functools.partial(self.deadlocks.hear, response.deadlock)
        entry.handle.fail(error)


def _error(name: str, response: Response) -> CoorddError:
    """Makes the error of an operation that a plan refuses."""
    if response.left:
        return ShutdownError(name, response.left)
    if response.refuser >= 0:
        return RefusedError(response.refuser, response.error)
    return MismatchError.told(name, response.attribute, response.error)
