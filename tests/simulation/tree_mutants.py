"""Bugs of the foremen between the ranks and the coordinator, each of which the simulator must find."""

from __future__ import annotations

import msgspec

from coordd.negotiation.aggregator import Foreman
from coordd.negotiation.channel import Lost
from coordd.negotiation.roll import Roll
from coordd.negotiation.tally import Tally
from coordd.ops.messages import Abort, Goodbye, Plan
from tests.simulation.planting import Mutants

TREE_MUTANTS = Mutants()
mutant = TREE_MUTANTS.enter


@mutant
def takes_old_bits_for_new_ones(monkeypatch):
    monkeypatch.setattr(Tally, "_outdated", lambda self, seen, hits: 0)


@mutant
def keeps_bits_while_their_slot_changes_hands(monkeypatch):
    follow = Tally.follow

    def _follow(self, plan):
        flush, self._flush = self._flush, lambda: None
        follow(self, plan)
        self._flush = flush

    monkeypatch.setattr(Tally, "follow", _follow)


@mutant
def promises_too_high_a_floor(monkeypatch):
    report = Tally._report

    def _report(self, **details):
        return msgspec.structs.replace(report(self, **details), floor=self._seen)

    monkeypatch.setattr(Tally, "_report", _report)


@mutant
def speaks_for_all_when_some_have_spoken(monkeypatch):
    report = Tally._report

    def _report(self, **details):
        return msgspec.structs.replace(report(self, **details), ranks=b"")

    monkeypatch.setattr(Tally, "_report", _report)


@mutant
def forgets_whom_it_has_passed_on(monkeypatch):
    monkeypatch.setattr(Tally, "_forget", lambda self, response: None)


@mutant
def keeps_a_round_that_was_answered(monkeypatch):
    monkeypatch.setattr(Roll, "withdraw", lambda self, ranks, slot: None)


@mutant
def waits_for_company_for_ever(monkeypatch):
    monkeypatch.setattr(Foreman, "deadline", property(lambda self: None))


@mutant
def takes_fillers_for_the_real_thing(monkeypatch):
    enter = Roll.enter
    monkeypatch.setattr(Roll, "enter", lambda self, ranks, hits, fillers=0: enter(self, ranks, hits))


@mutant
def lets_a_goodbye_overtake_what_was_announced(monkeypatch):
    collect = Foreman._collect

    def _collect(self, child, message):
        if isinstance(message, Goodbye):
            self._up.insert(0, Goodbye(message.ranks or self._post.spans[child].to_bytes(2, "little")))
        else:
            collect(self, child, message)

    monkeypatch.setattr(Foreman, "_collect", _collect)


@mutant
def says_nothing_of_a_loss(monkeypatch):
    collect = Foreman._collect

    def _collect(self, child, message):
        if not isinstance(message, Lost):
            collect(self, child, message)

    monkeypatch.setattr(Foreman, "_collect", _collect)


@mutant
def keeps_a_failure_to_itself(monkeypatch):
    instruct = Foreman._instruct

    def _instruct(self, message):
        instruct(self, message)
        if isinstance(message, Abort):
            self._down = [(rank, told) for rank, told in self._down if rank == self._post.rank]

    monkeypatch.setattr(Foreman, "_instruct", _instruct)


@mutant
def takes_a_lost_parent_for_a_quiet_one(monkeypatch):
    instruct = Foreman._instruct

    def _instruct(self, message):
        if not isinstance(message, Lost):
            instruct(self, message)

    monkeypatch.setattr(Foreman, "_instruct", _instruct)


@mutant
def adds_up_what_a_lock_has_overtaken(monkeypatch):
    follow = Tally.follow
    monkeypatch.setattr(Tally, "follow", lambda self, plan: follow(self, _unlocked(plan)))


def _unlocked(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, lock=())


@mutant
def counts_new_tensors_that_a_lock_has_overtaken(monkeypatch):
    hear = Tally.hear

    def _hear(self, child, report):
        self._dated = 0
        hear(self, child, report)

    monkeypatch.setattr(Tally, "hear", _hear)
