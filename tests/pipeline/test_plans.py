"""The plans of a pipeline."""

from __future__ import annotations

import pytest

import coordd.torch as cd
from coordd.errors import ArgumentError
from coordd.pipeline.action import Kind
from coordd.pipeline.lowering import chain
from coordd.pipeline.plans import Plans


def planned(schedule, microbatches, *, world=4, replicas=2, **how):
    config = cd.PipelineConfig(schedule=schedule, microbatches=4, data_parallel=replicas)
    plans = Plans(config, world)
    return plans.lowered(microbatches, tuple(chain(plans.sketch.stages)), frozenset(), **how)


def test_without_steps_each_stage_reduces_once_when_it_has_all_gradients():
    plan = planned("pipedream", 4, training=True, step=False)
    for mine in plan.actions:
        kinds = [action.kind for action in mine]
        assert Kind.STEP not in kinds
        assert kinds.count(Kind.REDUCE) == 1
        assert kinds.index(Kind.REDUCE) > max(place for place, kind in enumerate(kinds) if kind is Kind.BACKWARD)


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_one_microbatch_can_be_evaluated_whatever_the_schedule_wants_for_training(schedule):
    plan = planned(schedule, 1, world=3, replicas=1, training=False)
    assert plan.placement == planned(schedule, 4, world=3, replicas=1, training=True).placement
    assert not plan.versions
    assert {action.kind for mine in plan.actions for action in mine} <= {
        Kind.FORWARD,
        Kind.SEND_FORWARD,
        Kind.RECV_FORWARD,
    }


def test_a_schedule_that_must_be_full_wants_rows_for_all_stages():
    full, any_number = (
        Plans(cd.PipelineConfig(schedule=schedule, data_parallel=2), 6).least for schedule in ("2bw", "1f1b")
    )
    assert (full, any_number) == (6, 2)
    with pytest.raises(ArgumentError, match="2bw needs as many microbatches as stages, not 1 for 2"):
        planned("2bw", 1, training=True)
