"""Recordings of runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.pipeline.action import Action, Kind
from coordd.pipeline.measured import lag, observed
from coordd.pipeline.recording import Recording, check_name, check_recording
from coordd.pipeline.schedules.schedule import interleaved, one_f_one_b, zero_bubble
from coordd.pipeline.simulate import Costs, Span, simulate
from coordd.pipeline.units import Units
from tests.pipeline.plans import chained

PAIR = (0, 1)
COSTS = Costs([1.0, 2.0], [3.0, 0.5], [1.0, 4.0], {PAIR: 0.25}, {PAIR: 64}, activation=[100.0, 50.0], reduce=[])


def recording(schedule=one_f_one_b):
    plan = chained(schedule(2, 3))
    late = tuple(
        tuple(Span(action, 2 * begin, 2 * end) for action, begin, end in spans) for spans in simulate(plan, COSTS).spans
    )
    return Recording(plan, late, COSTS)


@pytest.mark.parametrize("schedule", [one_f_one_b, zero_bubble])
def test_what_is_written_can_be_read(tmp_path, schedule):
    recorded = recording(schedule)
    recorded.write(tmp_path / "run.json")
    again = Recording.read(tmp_path / "run.json")
    assert again == recorded
    assert again.measured.makespan == 2 * again.predicted.makespan


def test_as_a_text_it_compares_both_in_a_line():
    found = recording()
    assert str(found).startswith(f"1f1b: {2e3 * found.predicted.makespan:.0f} ms and ")
    assert str(found).endswith(f"predicted {1e3 * found.predicted.makespan:.0f} ms and {found.predicted.bubble:.1%}")


def test_steps_are_told_and_drawn():
    passes = recording()
    step = Span(Action(1, Kind.STEP), 60.0, 61.5)
    found = replace(passes, spans=(passes.spans[0], (*passes.spans[1], step)))
    assert found.measured.makespan == passes.measured.makespan
    assert str(found) == f"{passes}; 1500 ms to change the weights"
    assert "1STEP, rank 1: " in found.picture()
    assert "1.5 s to change the weights" in found.picture()


def test_a_picture_shows_both(tmp_path):
    recording().write(tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text("utf-8")
    assert "predicted: makespan " in text
    assert "measured: makespan " in text


@pytest.mark.parametrize("document", ["", "[]", "{}", json.dumps({"plan": "1f1b", "spans": [], "costs": {}})])
def test_what_is_no_recording_is_refused(tmp_path, document):
    path = tmp_path / "run.json"
    path.write_text(document)
    with pytest.raises(ArgumentError, match=r"run\.json is no recording of a pipeline: .*`Pipeline.record` writes one"):
        Recording.read(path)


def test_a_name_is_looked_at_before_anything_is_done(tmp_path):
    check_name(tmp_path / "run.json")
    with pytest.raises(ArgumentError, match=r"let run\.txt end in"):
        check_name(tmp_path / "run.txt")


def test_users_look_at_it_before_the_training(monkeypatch):
    for name in (None, "run.json", "run.svg"):
        check_recording(name)
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ArgumentError, match=r"CairoSVG, which cannot be loaded .* ends in \.svg$"):
        check_recording("run.png")


@pytest.mark.parametrize("schedule", [one_f_one_b, zero_bubble, interleaved])
def test_what_was_observed_leads_to_the_same_again(schedule):
    plan = chained(schedule(3, 4))
    costs = Costs.even(plan.stages, forward=2.0, inward=1.5, weight=0.5)
    found = simulate(plan, observed(plan, simulate(plan, costs).spans))
    assert found.makespan == simulate(plan, costs).makespan
    assert max(found.peaks) == max(simulate(plan).peaks) / (plan.stages // 3)


def test_a_stage_that_did_nothing_took_no_time():
    assert observed(chained(one_f_one_b(2, 2)), [[], []]).forward == [0.0, 0.0]


@given(st.floats(-1e3, 1e3), st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=8))
def test_a_clock_that_is_ahead_is_found_within_its_doubt(ahead, meetings):
    mine, first, narrow = [], [], []
    for at, (come, other, leave, later) in enumerate(meetings):
        all_here = at * 10.0 + max(come, other)
        mine.append((at * 10.0 + come + ahead, all_here + leave + ahead))
        first.append((at * 10.0 + other, all_here + later))
        narrow.append(mine[-1][1] - first[-1][0] - (mine[-1][0] - first[-1][1]))
    assert abs(lag(mine, first) - ahead) <= min(narrow) / 2 + 1e-9


def test_units_are_kept(tmp_path):
    recorded = recording()
    Recording(recorded.plan, recorded.spans, COSTS, Units(memory="activations")).write(tmp_path / "run.json")
    assert Recording.read(tmp_path / "run.json").units.memory == "activations"
