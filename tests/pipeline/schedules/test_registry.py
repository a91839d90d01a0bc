"""Schedules by name."""

from __future__ import annotations

import pytest

from coordd.errors import ArgumentError
from coordd.pipeline.schedules.registry import SCHEDULES, find
from coordd.pipeline.simulate import simulate
from tests.pipeline.plans import chained


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_its_name_its_ranks_and_its_chunks(name):
    choice = find(name)
    plan = choice.plan(4, 8, replicas=2)
    assert plan.name == choice.name == name
    assert len(plan.actions) == 8
    assert {len(held) for held in plan.held} == {choice.chunks}
    simulate(chained(plan))


def test_interleaved_has_as_many_chunks_as_are_wanted():
    assert find("interleaved").plan(4, 8, chunks=3).stages == 12


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_steps_follow_each_other_where_nothing_is_flushed(name):
    assert find(name).plan(4, 8, steps=3).microbatches == 24


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("interleved", "there is no schedule 'interleved', did you mean interleaved?"),
        ("1F1b", "did you mean 1f1b"),
        ("zbv", "did you mean zb-v"),
        ("dualpipe!", "there is no schedule 'dualpipe!'"),
    ],
)
def test_a_name_that_does_not_exist_comes_with_the_nearest(name, text):
    with pytest.raises(ArgumentError) as caught:
        find(name)
    assert text in str(caught.value)
    assert "choose one of gpipe, 1f1b" in str(caught.value)


def test_what_a_schedule_cannot_have_is_refused():
    with pytest.raises(ArgumentError, match="1f1b does not cut the layers of a rank into 2 stages"):
        find("1f1b").plan(4, 8, chunks=2)
    with pytest.raises(ArgumentError, match="gpipe has an empty pipeline between steps: plan one step, not 2"):
        find("gpipe").plan(4, 8, steps=2)
