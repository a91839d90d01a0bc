"""Bugs that somebody might write, each of which the simulator must find."""

from __future__ import annotations

import msgspec

from coordd.negotiation import fusion, message_table, worker
from coordd.negotiation.ballot import lowest
from coordd.negotiation.channel import Lost
from coordd.negotiation.coordinator import Coordinator
from coordd.negotiation.message_table import Negotiator
from coordd.negotiation.pending_errors import Owed
from coordd.negotiation.tensor_table import TensorTable
from coordd.negotiation.validation import _sizes
from coordd.negotiation.wire import bits
from coordd.negotiation.worker import Member
from coordd.ops.messages import Goodbye
from tests.simulation.planting import Mutants

MUTANTS = Mutants()
mutant = MUTANTS.enter


@mutant
def counts_bits_of_what_is_negotiated_by_name(monkeypatch):
    monkeypatch.setattr(Negotiator, "_spelled_out", lambda self: 0)


@mutant
def forgets_what_a_slot_held_before(monkeypatch):
    monkeypatch.setattr(Negotiator, "_outdated", lambda self, seen, hits: [])


@mutant
def forgets_it_as_soon_as_one_rank_knows(monkeypatch):
    def _forget(self):
        while self._replaced and self._replaced[0].sequence <= max(self._seen):
            self._replaced.popleft()

    monkeypatch.setattr(Negotiator, "_forget", _forget)


@mutant
def gives_away_slots_with_announced_bits(monkeypatch):
    monkeypatch.setattr(Negotiator, "_announced_by_any", lambda self: 0)


@mutant
def announces_duplicates(monkeypatch):
    admit = TensorTable.admit

    def admit_all(self, entries, cache, *, seen):
        for entry in (entries := list(entries)):
            self._entries.pop(entry.request.name, None)
        return admit(self, entries, cache, seen=seen)

    monkeypatch.setattr(TensorTable, "admit", admit_all)


@mutant
def leaves_a_plan_without_its_refusals(monkeypatch):
    decide = Negotiator.decide

    def forgetful(self):
        if self._complete:
            self._refused.clear()
        return decide(self)

    monkeypatch.setattr(Negotiator, "decide", forgetful)


@mutant
def releases_before_the_last_member(monkeypatch):
    settled = Negotiator._settled

    def hasty(self, entry):
        if entry.told.bit_count() == entry.wanted.bit_count() - 1 > 0:
            self._complete.append(entry)
            return True
        return settled(self, entry)

    monkeypatch.setattr(Negotiator, "_settled", hasty)


@mutant
def lets_those_wait_who_wait_for_a_rank_that_leaves(monkeypatch):
    def _leave(self, ranks):
        self._left |= ranks

    monkeypatch.setattr(Negotiator, "leave", _leave)


@mutant
def takes_a_dead_rank_for_one_that_has_left(monkeypatch):
    hear = Coordinator.hear

    def trusting(self, rank, message, *, now):
        if isinstance(message, Goodbye):
            self.__dict__.setdefault("gone", set()).add(rank)
        if not (isinstance(message, Lost) and rank in self.__dict__.get("gone", ())):
            hear(self, rank, message, now=now)

    monkeypatch.setattr(Coordinator, "hear", trusting)


@mutant
def refuses_contradicting_sets_only_to_those_who_came_first(monkeypatch):
    monkeypatch.setattr(Owed, "claim", lambda self, rank, name, members, seen: None)


@mutant
def overlooks_contradicting_sets(monkeypatch):
    monkeypatch.setattr(Negotiator, "_compare_sets", lambda self, rank, entry: None)


@mutant
def takes_fillers_for_the_real_thing(monkeypatch):
    known = Negotiator._known

    def _known(self, ranks, meant, *, filler):
        return known(self, ranks, meant, filler=False)

    monkeypatch.setattr(Negotiator, "_known", _known)


@mutant
def caches_only_what_concerns_this_rank(monkeypatch):
    follow = Member.follow

    def selfish(self, plan):
        def mine(response):
            members = response.request.members
            concerned = not members or self.rank in members
            return response if concerned else msgspec.structs.replace(response, slot=-1)

        return follow(self, msgspec.structs.replace(plan, responses=tuple(map(mine, plan.responses))))

    monkeypatch.setattr(Member, "follow", selfish)


@mutant
def evicts_another_slot_on_rank_1(monkeypatch):
    follow = Member.follow

    def shift(response):
        return response if response.slot < 1 else msgspec.structs.replace(response, slot=response.slot - 1)

    def wrong(self, plan):
        responses = tuple(map(shift, plan.responses)) if self.rank == 1 else plan.responses
        return follow(self, msgspec.structs.replace(plan, responses=responses))

    monkeypatch.setattr(Member, "follow", wrong)


@mutant
def numbers_only_its_own_buckets(monkeypatch):
    buckets = Member._buckets

    def selfish(self, agreed, fusion_bytes):
        mine = [told for told in agreed if not told.request.members or self.rank in told.request.members]
        return buckets(self, mine, fusion_bytes)

    monkeypatch.setattr(Member, "_buckets", selfish)


@mutant
def fuses_different_dtypes(monkeypatch):
    traits = fusion._traits
    monkeypatch.setattr(fusion, "_traits", lambda request: (traits(request)[0][1:], traits(request)[1]))


@mutant
def fuses_different_sets(monkeypatch):
    traits = fusion._traits
    monkeypatch.setattr(fusion, "_traits", lambda request: (traits(request)[0][:-1], traits(request)[1]))


@mutant
def fills_buckets_beyond_the_limit(monkeypatch):
    buckets = worker.buckets
    monkeypatch.setattr(worker, "buckets", lambda found, *, fusion_bytes: buckets(found, fusion_bytes=2 * fusion_bytes))


@mutant
def compares_only_names(monkeypatch):
    def credulous(parts, absent):
        first = parts[min(parts, key=lowest)].request
        sizes = _sizes(parts, absent) if first.kind is message_table.Kind.ALLGATHER else ()
        return message_table.Response(first, sizes=sizes, absent=tuple(bits(absent)))

    monkeypatch.setattr(message_table, "verdict", credulous)


@mutant
def tells_only_the_first_rank_of_a_failure(monkeypatch):
    fail = Coordinator._fail

    def _fail(self, failure):
        voices, self._voices = self._voices, self._voices[:1]
        fail(self, failure)
        self._voices = voices

    monkeypatch.setattr(Coordinator, "_fail", _fail)


@mutant
def asks_nobody_about_a_stall_but_says_so(monkeypatch):
    waiting = Negotiator.waiting

    def mistaken(self, rank):
        everybody = tuple(range(self._everybody.bit_length()))
        return [msgspec.structs.replace(item, missing=everybody) for item in waiting(self, rank)]

    monkeypatch.setattr(Negotiator, "waiting", mistaken)
