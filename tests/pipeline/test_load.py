"""Loads add up, and stages hold what the schedules' closed forms say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.pipeline.load import Load, Memory, shares
from coordd.pipeline.schedules.schedule import gpipe, interleaved, one_f_one_b, zero_bubble
from tests.pipeline.splits import even, loads


@given(st.lists(loads, min_size=1, max_size=9), st.data())
def test_the_stages_together_have_the_load_of_the_whole(items, data):
    stages = even(len(items), data.draw(st.integers(1, len(items))))
    assert Load.total(share.load for share in shares(items, stages)) == Load.total(items)


def test_the_total_of_nothing_is_nothing():
    assert Load.total([]) == Load(layers=0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_load_that_cannot_be_is_refused(value):
    with pytest.raises(ArgumentError, match="has a negative or endless cost: measure that layer again"):
        Load(1.0, value)


@pytest.mark.parametrize(
    ("schedule", "live", "weight"),
    [
        ("gpipe", [6, 6, 6, 6], [4, 4, 4, 4]),
        ("1f1b", [4, 3, 2, 1], [4, 4, 4, 4]),
        ("1f1b-eager", [6, 5, 3, 1], [4, 4, 4, 4]),
        ("zb-h1", [4, 4, 4, 4], [4, 4, 4, 4]),
        ("zb-h2", [6, 6, 6, 6], [4, 4, 4, 4]),
        ("zb-lean", [4, 4, 4, 4], [4, 4, 4, 4]),
        ("zb-h2-lean", [6, 6, 6, 6], [4, 4, 4, 4]),
        ("pipedream", [4, 3, 2, 1], [7, 6, 5, 4]),
        ("2bw", [4, 3, 2, 1], [5, 5, 5, 5]),
    ],
)
def test_what_stages_hold_under_each_schedule(schedule, live, weight):
    memory = Memory(schedule=schedule, microbatches=6)
    found = shares([Load(1.0, 2.0, 10, 100)] * 4, even(4, 4), memory=memory)
    assert [share.live for share in found] == live
    assert [share.memory for share in found] == [
        10 * weights + 100 * alive for weights, alive in zip(weight, live, strict=True)
    ]


def test_no_more_is_live_than_there_are_microbatches():
    assert [Memory(microbatches=2).live(stage, 4) for stage in range(4)] == [2, 2, 2, 1]


def test_a_stage_pays_for_both_its_cuts():
    found = shares([Load(1.0, 2.0)] * 6, even(6, 3), cuts=[9.0, 0.5, 9.0, 0.25, 9.0])
    assert [share.exchange for share in found] == [0.5, 0.75, 0.25]
    assert [share.seconds for share in found] == [6.5, 6.75, 6.25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "interleaved"}, "under 'interleaved' has no closed form; choose one of gpipe, 1f1b, pipedream"),
        ({"microbatches": 0}, "a step of 0 microbatches trains nothing: give one or more"),
        ({"state": -1.0}, "an optimizer cannot have -1.0 bytes of state"),
        ({"cap": -5}, "cannot be kept below -5 bytes"),
        ({"cap": float("nan")}, "cannot be kept below nan bytes"),
    ],
)
def test_memory_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Memory(**arguments)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, zero_bubble])
@given(stages=st.integers(1, 5), microbatches=st.integers(1, 9))
def test_what_a_plan_keeps_is_what_its_closed_form_says(schedule, stages, microbatches):
    plan = schedule(stages, microbatches)
    counted, told = Memory(plan=plan), Memory(schedule=plan.name, microbatches=microbatches)
    assert [counted.live(at, stages) for at in range(stages)] == [told.live(at, stages) for at in range(stages)]


def test_what_has_no_closed_form_is_counted():
    assert [Memory(plan=interleaved(2, 4)).live(stage, 4) for stage in range(4)] == [4, 3, 2, 1]
    wide = one_f_one_b(2, 4, replicas=[1, 2])
    assert [Memory(plan=wide).live(stage, 2) for stage in range(2)] == [3, 1]


def test_recomputing_keeps_what_enters_and_one_microbatch():
    items = [Load(1.0, 2.0, 10, 100)] * 4
    memory = Memory(microbatches=6, state=0.0, recompute=True, entering=[7, 8, 9])
    assert [share.memory for share in shares(items, even(4, 4), memory=memory)] == [120, 141, 136, 129]
    kept = replace(memory, recompute=False)
    assert [share.memory for share in shares(items, even(4, 4), memory=kept)] == [420, 341, 236, 129]
