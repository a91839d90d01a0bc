"""What a step costs with each schedule."""

from __future__ import annotations

import pytest

from coordd.pipeline.outcome import outcome, versions
from coordd.pipeline.schedules.registry import SCHEDULES, find
from coordd.pipeline.schedules.schedule import one_f_one_b, pipedream, two_buffered
from coordd.pipeline.simulate import Costs


def even(stages, chunks):
    share = [1 / chunks] * stages
    return Costs(share, share, share, activation=share)


@pytest.mark.parametrize(
    ("name", "seconds", "peak"),
    [
        ("gpipe", 33, 8),
        ("1f1b", 33, 4),
        ("1f1b-eager", 33, 7),
        ("interleaved", 28.5, 5.5),
        ("zb-h1", 27, 4),
        ("zb-h2", 27, 7),
        ("zb-lean", 27, 4),
        ("zb-h2-lean", 27, 7),
        ("zb-v", 25.5, 4),
    ],
)
def test_a_step_that_flushes_takes_all_its_time(name, seconds, peak):
    found = outcome(find(name), 4, 8, even)
    assert (found.seconds, found.peak, found.versions) == (seconds, peak, 1)
    assert found.bubble == pytest.approx(1 - 24 / seconds)


@pytest.mark.parametrize("microbatches", [4, 8, 13])
@pytest.mark.parametrize(("name", "kept"), [("pipedream", 4), ("2bw", 2)])
def test_a_step_between_others_has_no_idle_time(name, kept, microbatches):
    found = outcome(find(name), 4, microbatches, even)
    assert (found.seconds, found.bubble, found.peak, found.versions) == (3 * microbatches, 0, 4, kept)


def test_few_microbatches_leave_pipedream_idle_only_while_it_fills():
    assert outcome(find("pipedream"), 4, 1, even).bubble == pytest.approx(0)


def test_versions_of_weights_are_those_that_are_still_needed():
    assert versions(one_f_one_b(4, 8)) == 1
    assert [versions(pipedream(stages, 12)) for stages in (1, 2, 4, 6)] == [1, 2, 4, 6]
    assert [versions(two_buffered(stages, 6, steps=3)) for stages in (2, 4, 6)] == [2, 2, 2]


def test_all_schedules_can_be_compared():
    assert [outcome(choice, 2, 4, even).name for choice in SCHEDULES.values()] == list(SCHEDULES)
