"""What is added to a schedule so that it runs on many ranks."""

from __future__ import annotations

import pytest

from coordd.pipeline.action import Kind
from coordd.pipeline.lowering import lower
from coordd.pipeline.plan import Plan
from coordd.pipeline.schedules.schedule import gpipe, one_f_one_b, zero_bubble_v
from coordd.pipeline.simulate import simulate
from tests.pipeline.plans import ALL, chained


def test_one_forward_one_backward():
    assert str(chained(one_f_one_b(2, 2))).splitlines() == [
        "1f1b, 2 microbatches, stages on 0 | 1",
        "0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP",
        "1: 1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP",
    ]


def test_a_skip_goes_straight_to_who_takes_it():
    plan = lower(gpipe(3, 1), [(0, 1), (1, 2), (0, 2)])
    assert str(plan).splitlines()[1:] == [
        "0: 0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<2 0RECV_B0<1 0B0 0STEP",
        "1: 1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1STEP",
        "2: 2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1 2SEND_B0>0 2STEP",
    ]


def test_stages_of_one_rank_send_each_other_nothing():
    plan = chained(zero_bubble_v(2, 2))
    pairs = {(action.stage, action.peer) for actions in plan.actions for action in actions if action.peer >= 0}
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_what_replicas_or_ties_share_is_reduced_as_early_as_may_be():
    plan = lower(one_f_one_b(2, 2, replicas=2), [(0, 1)])
    assert str(plan).splitlines()[2].endswith("1B2 1SEND_B2>0 1REDUCE 1STEP")
    plan = lower(zero_bubble_v(2, 2), [(0, 1), (1, 2), (2, 3)], tied={0, 3})
    kinds = [str(action) for action in plan.actions[0] if action.kind in {Kind.WEIGHT, Kind.REDUCE, Kind.STEP}]
    assert kinds == ["0W0", "3W0", "0W1", "0REDUCE", "3W1", "3REDUCE", "0STEP", "3STEP"]


def test_each_step_between_has_a_reduction_of_its_own():
    plan = lower(ALL["pipedream"](2, 2, replicas=2), [(0, 1)])
    kinds = [str(action) for action in plan.actions[0] if action.kind in {Kind.REDUCE, Kind.STEP}]
    assert kinds == ["0REDUCE0", "0STEP0", "0REDUCE2", "0STEP2"]


@pytest.mark.parametrize("name", ALL)
def test_a_lowered_plan_prints_and_parses(name):
    plan = chained(ALL[name](3, 4))
    parsed = Plan.parse(str(plan))
    assert parsed.actions == plan.actions
    assert simulate(parsed).makespan == simulate(plan).makespan
