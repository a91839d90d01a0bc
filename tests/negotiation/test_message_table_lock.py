"""When the coordinator locks, and what it forgets of reports that a lock has overtaken."""

from __future__ import annotations

import pytest

from coordd.negotiation.message_table import Negotiator
from coordd.ops.messages import Kind, Plan, Request
from tests.minds import knowing, say, told
from tests.star import allreduce

W, V, X = (allreduce(name, 2) for name in "wvx")
SOME = (Request(Kind.BROADCAST, "b", root=0), Request(Kind.BARRIER, "y"), allreduce("m", members=(0,)))


def steady(*requests: Request, capacity: int = 64, steps: int = 2) -> Negotiator:
    return knowing(*requests, capacity=capacity, lock_steps=steps)


def step(made: Negotiator, hits: int, seen: int, *, fillers: int = 0) -> Plan | None:
    """Both ranks announce the same bits."""
    for rank in (0, 1):
        made.hear(rank, say(seen=seen, hits=hits, fillers=fillers * rank))
    return made.decide()


def test_a_step_that_has_come_often_enough_is_locked_in_the_plan_that_completes_it():
    made = steady(W, V, steps=3)
    assert [step(made, 0b11, seen).lock for seen in (1, 2, 3)] == [(), (), ((0, 1),)]


def test_without_steps_nothing_is_locked():
    made = steady(W, steps=0)
    assert not any(step(made, 0b1, seen).lock for seen in range(1, 20))


def test_only_allreduces_of_the_whole_world_are_locked():
    made = steady(W, *SOME)
    for seen in (1, 2):
        for rank in (0, 1):
            made.hear(rank, say(seen=seen, hits=0b111 | 0b1000 * (not rank)))
        plan = made.decide()
    assert plan.lock == ((0,),)


def test_fillers_are_left_out():
    made = steady(W, V)
    assert [step(made, 0b11, seen, fillers=0b10).lock for seen in (1, 2)] == [(), ((0,),)]


def test_buckets_are_those_of_the_last_step():
    made = steady(W, V, X)
    step(made, 0b111, 1)
    assert not step(made, 0b010, 2).lock
    assert step(made, 0b101, 3).lock == ((1,), (0, 2))


def locked(*requests: Request, **details: int) -> Negotiator:
    """A negotiator whose plan 3 has locked everything."""
    made = steady(*requests, **details)
    step(made, (1 << len(requests)) - 1, 1)
    assert step(made, (1 << len(requests)) - 1, 2).lock
    return made


def test_reports_that_a_lock_has_overtaken_do_not_count():
    made = locked(W, V)
    made.hear(0, say(X, allreduce("v", 9), seen=2, hits=0b1))
    made.hear(1, say(X, seen=2, hits=0b1))
    assert told(made.decide()) == ["x"]
    assert not made.waiting(0)


@pytest.mark.parametrize("early", [say(seen=1, hits=0b1), say(W, seen=1), say(allreduce("w", 9), seen=1)])
def test_what_was_counted_before_the_lock_does_not_count_either(early):
    made = steady(W, V)
    step(made, 0b01, 1)
    step(made, 0b10, 2)
    step(made, 0b01, 3)
    made.hear(0, early)
    assert step(made, 0b10, 4).lock == ((0,), (1,))
    assert not made.waiting(0)
    made.hear(0, say(seen=5, hits=0b1, unlock=5))
    made.hear(1, say(seen=5, hits=0b1))
    assert told(made.decide()) == ["slot 0"]


def test_the_end_of_a_lock_is_told_even_if_there_is_nothing_else_to_say():
    made = locked(W)
    made.hear(1, say(seen=3, unlock=3))
    assert made.unlocking
    plan = made.decide()
    assert (plan.unlock, plan.hits, plan.responses) == (3, b"", ())
    assert not made.unlocking
    assert made.decide() is None


def test_overtaken_reports_do_not_count_after_the_lock_has_ended_either():
    made = locked(W)
    made.hear(0, say(seen=3, hits=0b1, unlock=3))
    made.hear(1, say(seen=2, hits=0b1))
    assert told(made.decide()) == []
    made.hear(1, say(seen=4, hits=0b1))
    assert told(made.decide()) == ["slot 0"]


def test_locked_slots_stay_and_others_are_given_away():
    made = knowing(W, V, X, capacity=3, lock_steps=2)
    step(made, 0b011, 1)
    assert step(made, 0b011, 2).lock == ((0, 1),)
    for name in ("n", "m"):
        for rank in (0, 1):
            made.hear(rank, say(allreduce(name), seen=3))
        assert made.decide().responses[0].slot == 2


def test_nothing_is_locked_while_a_rank_is_owed_a_refusal():
    """It would count one round of that name less than the others."""
    made = knowing(W, V, size=3, lock_steps=2)
    for rank in (0, 1, 2):
        made.hear(rank, say(seen=1, hits=0b11))
    made.decide()
    for rank in (0, 1, 2):
        made.hear(rank, say(seen=2, hits=0b01))
    made.decide()
    for rank in (0, 1, 2):
        made.hear(rank, say(seen=3, hits=0b10))
    made.hear(0, say(allreduce("w", 2, members=(0, 1)), seen=3))
    made.hear(1, say(W, seen=3))
    plan = made.decide()
    assert told(plan) == ["slot 1", "w: process set, refused to [0, 1]"]
    assert not plan.lock


def test_after_a_rank_has_left_nothing_is_locked():
    made = steady(W)
    step(made, 0b1, 1)
    made.leave(1 << 0)
    assert not step(made, 0b1, 2).lock
