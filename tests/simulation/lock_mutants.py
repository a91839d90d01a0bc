"""Bugs of a locked plan, each of which the simulator must find."""

from __future__ import annotations

import msgspec

from coordd.negotiation.coordinator_lock import Latch
from coordd.negotiation.locked_plan import Lock
from coordd.negotiation.message_table import Negotiator
from coordd.negotiation.tensor_table import TensorTable
from coordd.negotiation.worker import Member
from tests.simulation.planting import Mutants

LOCK_MUTANTS = Mutants()
mutant = LOCK_MUTANTS.enter


@mutant
def counts_bits_that_a_lock_has_overtaken(monkeypatch):
    monkeypatch.setattr(Latch, "overtaken", lambda self, seen: 0)


@mutant
def counts_names_that_a_lock_has_overtaken(monkeypatch):
    monkeypatch.setattr(Latch, "overtakes", lambda self, request, seen: False)


@mutant
def keeps_what_it_has_counted_of_what_it_locks(monkeypatch):
    lock = Negotiator._lock

    def _lock(self, hits, responses):
        groups, table = dict(self._roll._groups), dict(self._table)
        found = lock(self, hits, responses)
        self._roll._groups, self._table = groups, table
        return found

    monkeypatch.setattr(Negotiator, "_lock", _lock)


@mutant
def gives_away_locked_slots(monkeypatch):
    monkeypatch.setattr(Latch, "slots", property(lambda self: 0))


@mutant
def takes_nothing_back(monkeypatch):
    def _enter(self, lock):
        self._lock = self._locks[lock.number] = lock

    monkeypatch.setattr(Member, "_enter", _enter)


@mutant
def takes_an_entry_that_comes_again_for_what_it_was(monkeypatch):
    admit = TensorTable.admit

    def _admit(self, entries):
        entries = list(entries)
        marks = [(entry, entry.released) for entry in entries]
        admitted = admit(self, entries)
        for entry, released in marks:
            entry.released = released
        return admitted

    monkeypatch.setattr(TensorTable, "admit", _admit)


@mutant
def takes_back_what_is_on_its_way(monkeypatch):
    enter = Member._enter

    def _enter(self, lock):
        for entry in self.table:
            entry.released = False
        enter(self, lock)

    monkeypatch.setattr(Member, "_enter", _enter)


@mutant
def holds_back_what_is_waited_for(monkeypatch):
    monkeypatch.setattr(Member, "awaited", lambda self: self._due())


@mutant
def leaves_without_breaking_the_lock(monkeypatch):
    def leave(self):
        due, self._left = self._due(), True
        return due

    monkeypatch.setattr(Member, "leave", leave)


@mutant
def lets_fillers_in(monkeypatch):
    sort = Member._sort

    def _sort(self, entry):
        filler, entry.filler = entry.filler, False
        sort(self, entry)
        entry.filler = filler

    monkeypatch.setattr(Member, "_sort", _sort)


@mutant
def lets_other_shapes_in(monkeypatch):
    sort = Member._sort

    def _sort(self, entry):
        slot = self._cache.slot_of(entry.request.name)
        request = entry.request
        if self._lock is not None and slot in self._lock:
            entry.request = self._cache.request(slot)
        sort(self, entry)
        entry.request = request

    monkeypatch.setattr(Member, "_sort", _sort)


@mutant
def does_not_say_that_it_has_broken_the_lock(monkeypatch):
    report = Member._report

    def _report(self):
        told = report(self)
        return told and msgspec.structs.replace(told, unlock=0)

    monkeypatch.setattr(Member, "_report", _report)


@mutant
def loses_what_was_gathered(monkeypatch):
    dissolve = Lock.dissolve
    monkeypatch.setattr(Lock, "dissolve", lambda self: (dissolve(self)[0], []))


@mutant
def loses_what_was_refused(monkeypatch):
    refused = Member.refused

    def forgetful(self, locked):
        return refused(self, msgspec.structs.replace(locked, bucket=None))

    monkeypatch.setattr(Member, "refused", forgetful)


@mutant
def announces_what_has_been_given_a_valid_word(monkeypatch):
    gather, dissolve = Lock.gather, Lock.dissolve

    def _gather(self, slot, entry):
        word = gather(self, slot, entry)
        self.__dict__.setdefault("sent", []).extend(word.bucket.entries if word else ())
        return word

    def _dissolve(self):
        words, entries = dissolve(self)
        return words, [*entries, *self.__dict__.get("sent", ())] if self.flying else entries

    monkeypatch.setattr(Lock, "gather", _gather)
    monkeypatch.setattr(Lock, "dissolve", _dissolve)


@mutant
def gives_the_next_word_before_the_outcome(monkeypatch):
    dissolve = Lock.dissolve

    def _dissolve(self):
        for line in self._lines:
            line.flying = False
        return dissolve(self)

    monkeypatch.setattr(Lock, "dissolve", _dissolve)


@mutant
def keeps_its_word_to_itself_after_landing(monkeypatch):
    land = Lock.land
    monkeypatch.setattr(Lock, "land", lambda self, locked: land(self, locked) and None)


@mutant
def gives_another_word_after_a_refusal(monkeypatch):
    def refuse(self, locked):
        self._lines[locked.index].flying = False

    monkeypatch.setattr(Lock, "refuse", refuse)


@mutant
def breaks_only_buckets_that_are_partly_there(monkeypatch):
    dissolve = Lock.dissolve

    def _dissolve(self):
        empty = {line.index for line in self._lines if not line.entries}
        words, entries = dissolve(self)
        return [word for word in words if word.index not in empty], entries

    monkeypatch.setattr(Lock, "dissolve", _dissolve)
