from __future__ import annotations

import pytest

from coordd.monitoring.timeline.breakdown import Part
from coordd.monitoring.timeline.journal import Journal
from coordd.monitoring.timeline.summary import summarize
from coordd.monitoring.timeline.trace import find
from tests.monitoring.timeline.recorded import STEP, passage, record, training


@pytest.fixture
def journals(tmp_path):
    for rank in range(2):
        record(tmp_path, rank, training(rank, late=0.025), ahead=100.0 * rank)
    return [Journal(trace.rank, trace.events()) for trace in find(tmp_path)]


def test_where_a_step_went(journals):
    summary = summarize(journals)
    assert summary.anchor == "g0"
    assert len(summary.steps) == 8
    assert summary.seconds == pytest.approx(STEP, abs=1e-4)
    punctual, late = summary.shares
    assert punctual.spent[Part.LATE] == pytest.approx(0.025, abs=1e-4)
    assert late.spent[Part.LATE] == pytest.approx(0.0, abs=1e-4)
    for share in summary.shares:
        assert share.spent[Part.NEGOTIATION] == pytest.approx(0.001, abs=1e-4)
        assert share.spent[Part.TRANSFER] == pytest.approx(0.010, abs=1e-4)
        assert share.spent[Part.REST] == pytest.approx(0.0, abs=1e-4)
    assert late.exposed == pytest.approx(0.011, abs=1e-4)


def test_who_came_last_how_often_and_what_it_cost(journals):
    (late,) = summarize(journals).late
    assert (late.rank, late.times, late.share) == (1, 8, 1.0)
    assert late.behind == pytest.approx(0.025, abs=1e-4)
    assert late.cost == pytest.approx(0.025, abs=1e-4)


def test_outliers_do_not_count(tmp_path):
    for rank in range(2):
        items = [*training(rank, steps=20), passage(99, 1003.0, landed=1005.0)]
        record(tmp_path, rank, items)
    summary = summarize([Journal(trace.rank, trace.events()) for trace in find(tmp_path)])
    assert summary.seconds == pytest.approx(STEP, abs=1e-4)
    assert max(one.seconds for found in summary.steps for one in found) > 0.9
    assert summary.typical in summary.middle


def test_a_tensor_may_be_named(journals):
    assert summarize(journals, "g1").anchor == "g1"
    assert summarize(journals, "nothing") is None


def test_nothing_that_repeats_gives_no_summary():
    assert summarize([Journal(0, ()), Journal(1, ())]) is None


def test_steps_that_a_rank_has_not_recorded_are_left_out(tmp_path):
    record(tmp_path, 0, training(0))
    record(tmp_path, 1, list(training(1))[4:])
    summary = summarize([Journal(trace.rank, trace.events()) for trace in find(tmp_path)])
    assert [found[0].step.key for found in summary.steps] == [f"{number}:{number}" for number in range(3, 9)]
