"""Bugs of joining, each of which the simulator must find."""

from __future__ import annotations

from coordd.negotiation.absence import Absence
from coordd.negotiation.coordinator_lock import Latch
from coordd.negotiation.stand_in import stand_in
from coordd.negotiation.tally import Tally
from coordd.negotiation.worker import Member
from coordd.ops.messages import Kind
from tests.simulation.planting import Mutants

JOIN_MUTANTS = Mutants()
mutant = JOIN_MUTANTS.enter


@mutant
def joins_before_its_words_are_settled(monkeypatch):
    def _join(self):
        self._untold += self._joining
        self._joining = []

    monkeypatch.setattr(Member, "_join", _join)


@mutant
def counts_joins_that_a_lock_has_overtaken(monkeypatch):
    overtakes = Latch.overtakes
    monkeypatch.setattr(
        Latch,
        "overtakes",
        lambda self, request, seen: request.kind is not Kind.JOIN and overtakes(self, request, seen),
    )


@mutant
def puts_stand_ins_into_the_table(monkeypatch):
    entry = Member._entry

    def _entry(self, response):
        if self.rank in response.absent:
            self.table.admit([stand_in(response.request)])
            return self.table.find(response.request.name)
        return entry(self, response)

    monkeypatch.setattr(Member, "_entry", _entry)


@mutant
def forgets_who_has_joined(monkeypatch):
    begin = Absence.begin

    def only_the_first(self, members, ranks):
        if not self:
            begin(self, members, ranks)

    monkeypatch.setattr(Absence, "begin", only_the_first)


@mutant
def lets_a_join_overtake_what_was_said_before(monkeypatch):
    def _join(self, ranks, report):
        self._out.append(self._report(seen=report.seen, fresh=report.fresh, ranks=ranks))

    monkeypatch.setattr(Tally, "_join", _join)


@mutant
def goes_on_without_those_who_have_joined_only_another_set(monkeypatch):
    def of(self, members):
        found = 0
        for ranks in self._joined.values():
            found |= ranks
        return found

    monkeypatch.setattr(Absence, "of", of)
