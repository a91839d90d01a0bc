"""Recorded passes as a timeline."""

from __future__ import annotations

import pytest

from coordd.errors import ArgumentError
from coordd.pipeline.action import Action, Kind
from coordd.pipeline.measured import measured
from coordd.pipeline.schedules.schedule import gpipe, one_f_one_b, zero_bubble
from coordd.pipeline.simulate import Costs, Span, simulate
from tests.pipeline.plans import chained

COSTS = Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, volume={(0, 1): 8, (1, 2): 16}, activation=[2.0, 3.0, 5.0])


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, zero_bubble])
def test_what_went_as_predicted_is_what_was_predicted(schedule):
    plan = chained(schedule(3, 4))
    predicted = simulate(plan, COSTS)
    late = [[Span(action, begin + 64, end + 64) for action, begin, end in spans] for spans in predicted.spans]
    assert measured(plan, late, COSTS) == predicted


def test_passes_count_and_steps_are_told_beside_them():
    plan = chained(gpipe(1, 1))
    step, reduction = Span(Action(0, Kind.STEP), 3.0, 9.0), Span(Action(0, Kind.REDUCE), 0.0, 0.5)
    passes = [Span(Action(0, Kind.BACKWARD, 0), 1.0, 3.0), Span(Action(0, Kind.FORWARD, 0), 0.5, 1.0)]
    spans = [reduction, step, *passes]
    found = measured(plan, [spans])
    assert [str(span.action) for span in found.spans[0]] == ["0F0", "0B0"]
    assert (found.makespan, found.bubble, found.peaks, found.volume) == (2.5, 0.0, (0.0,), 0)
    assert (found.steps, found.step) == (((Span(step.action, 2.5, 8.5),),), 6.0)


def test_a_step_in_which_nothing_was_done():
    assert measured(chained(gpipe(2, 1)), [[], []]).makespan == 0


def test_recordings_that_cannot_be_are_refused():
    plan = chained(gpipe(2, 1))
    with pytest.raises(ArgumentError, match="spans of 1 ranks for a plan of 2: gather those of all ranks"):
        measured(plan, [[]])
    with pytest.raises(ArgumentError, match="0F0 of rank 0 ended before it began"):
        measured(plan, [[Span(Action(0, Kind.FORWARD, 0), 2.0, 1.0)], []])
