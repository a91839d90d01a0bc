"""Bugs in how refused calls and ranks that wait for each other are handled, each of which the simulator must find."""

from __future__ import annotations

import msgspec

from coordd.daemon.blocked_script import BlockWatch
from coordd.negotiation import message_table
from coordd.negotiation.aggregator import Foreman
from coordd.negotiation.deadlock import RECEIVE, SEND, BlockedRanks, BlockedSums
from coordd.negotiation.group_names import group_of
from coordd.negotiation.leavers import Leavers
from coordd.negotiation.message_table import Negotiator
from coordd.negotiation.rejections import Refusals, RefusedParts, _Part
from coordd.negotiation.wire import bits
from coordd.negotiation.worker import Member
from coordd.ops.messages import Kind, Refused
from coordd_tools.sim.process import _Watch
from tests.simulation.planting import Mutants

DEADLOCK_MUTANTS = Mutants()
mutant = DEADLOCK_MUTANTS.enter


@mutant
def forgets_a_refused_call_at_once(monkeypatch):
    monkeypatch.setattr(Negotiator, "_not_refused", lambda self, ranks, request: ranks)


@mutant
def keeps_a_refused_call_for_ever(monkeypatch):
    enter = Refusals.enter

    def kept(self, refused, members, left):
        return enter(self, refused, members | 1 << 63, left)

    monkeypatch.setattr(Refusals, "enter", kept)


@mutant
def never_judges(monkeypatch):
    monkeypatch.setattr(BlockedRanks, "take", lambda self: {})


@mutant
def lets_messages_wait_for_ever(monkeypatch):
    monkeypatch.setattr(BlockedRanks, "messages", lambda self, blocked: iter(()))


def believe(monkeypatch, kind):
    """Takes a message for one that will never come, or never be taken, whatever is under way."""
    messages = BlockedRanks.messages

    def believed(self, blocked):
        if kind is SEND:
            sends = {(each.peer, rank, each.number) for each, ranks in blocked.items() for rank in bits(ranks)}
            monkeypatch.setattr(self, "_unclaimed", sends)
        else:
            heard = {(each.peer, rank): each.heard for each, ranks in blocked.items() for rank in bits(ranks)}
            monkeypatch.setattr(self, "_sent", heard)
        return messages(self, blocked)

    monkeypatch.setattr(BlockedRanks, "messages", believed)


@mutant
def does_not_ask_what_is_under_way(monkeypatch):
    believe(monkeypatch, RECEIVE)


@mutant
def does_not_ask_whether_a_message_has_come(monkeypatch):
    believe(monkeypatch, SEND)


@mutant
def tells_no_rank_who_has_left(monkeypatch):
    monkeypatch.setattr(Leavers, "take", lambda self: ())


@mutant
def forgets_what_ranks_below_a_foreman_have_sent(monkeypatch):
    hear = BlockedSums.hear

    def heard(self, ranks, blocked):
        hear(self, ranks, msgspec.structs.replace(blocked, sent=()))

    monkeypatch.setattr(BlockedSums, "hear", heard)


@mutant
def lets_joins_wait_for_ever(monkeypatch):
    end = Negotiator._fail_between

    def _fail_between(self, ranks, error, **rest):
        joins = {
            name: sets
            for name, sets in self._table.items()
            if any(entry.first.request.kind is Kind.JOIN for entry in sets.values())
        }
        for name in joins:
            del self._table[name]
        end(self, ranks, error, **rest)
        self._table.update(joins)

    monkeypatch.setattr(Negotiator, "_fail_between", _fail_between)


@mutant
def takes_every_two_blocked_ranks_for_a_circle(monkeypatch):
    monkeypatch.setattr(message_table, "deadlocked", list)


@mutant
def does_not_tell_that_it_is_blocked_no_more(monkeypatch):
    monkeypatch.setattr(BlockWatch, "note_news", lambda self, now: None)


@mutant
def takes_a_rank_with_threads_for_blocked(monkeypatch):
    monkeypatch.setattr(_Watch, "_others_may_submit", lambda self: False)


@mutant
def lets_a_join_overtake_a_refusal(monkeypatch):
    turn, gather = Foreman.turn, Foreman._gather

    def _gather(self, child, message):
        if isinstance(message, Refused):
            self.__dict__.setdefault("late", []).append(message)
            self._deadline = 0.0  # what is held goes up with it
        else:
            gather(self, child, message)

    def turns(self, now):
        up, late = self._post.parent, self.__dict__.pop("late", [])
        return sorted([*turn(self, now), *((up, message) for message in late)], key=lambda item: item[0] != up)

    monkeypatch.setattr(Foreman, "_gather", _gather)
    monkeypatch.setattr(Foreman, "turn", turns)


@mutant
def forgets_a_refused_operation_at_once(monkeypatch):
    monkeypatch.setattr(RefusedParts, "enter", lambda self, refused, name, wanted, inside, told: None)


@mutant
def keeps_a_refused_operation_for_the_next_round(monkeypatch):
    monkeypatch.setattr(_Part, "hear", lambda self, ranks, size: None)


@mutant
def forgets_a_refused_group_with_its_last_operation(monkeypatch):
    claim = RefusedParts.claim

    def claimed(self, name, members, ranks, seen):
        found = claim(self, name, members, ranks, seen)
        group, size = group_of(name)
        last = name.endswith(f"_{size - 1}of{size}")
        for part in self._parts.get((group, members), ()) if last else ():
            part.inside &= ~ranks
        return found

    monkeypatch.setattr(RefusedParts, "claim", claimed)


@mutant
def keeps_a_refusal_to_the_process_set_that_it_names(monkeypatch):
    monkeypatch.setattr(RefusedParts, "take_over", lambda self, name, members, wanted, told: None)


@mutant
def lets_ranks_stay_joined_after_a_refused_join(monkeypatch):
    refuse, end = Negotiator._refuse_part, Negotiator._end_absence

    def _refuse_part(self, refused, name):
        monkeypatch.setattr(Negotiator, "_end_absence", lambda self, entry: -1)
        refuse(self, refused, name)
        monkeypatch.setattr(Negotiator, "_end_absence", end)

    monkeypatch.setattr(Negotiator, "_refuse_part", _refuse_part)


@mutant
def takes_a_refused_operation_for_the_call_of_all_that_have_none(monkeypatch):
    refuse = Member.refuse

    def refused(self, one):
        due = refuse(self, one)
        if any(not entry.request.call for entry in self.table):
            self._refused_calls[""] = one
        return due

    monkeypatch.setattr(Member, "refuse", refused)


@mutant
def locks_what_a_rank_has_refused(monkeypatch):
    monkeypatch.setattr(RefusedParts, "__iter__", lambda self: iter(()))


@mutant
def keeps_an_error_that_no_script_asks_for_after_a_barrier(monkeypatch):
    monkeypatch.setattr(Member, "_pass_barrier", lambda self: None)
