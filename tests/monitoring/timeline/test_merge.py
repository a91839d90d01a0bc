from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd.monitoring.timeline.clock import Reading
from coordd.monitoring.timeline.merge import merge
from coordd.monitoring.timeline.trace import find
from tests.monitoring.timeline.recorded import record, training


def merged(folder):
    target = folder / "timeline.json"
    merge(find(folder), target)
    return json.loads(target.read_text())


def keyed(events, rank):
    found = [event for event in events if event["pid"] == rank and event["ph"] == "X" and event["name"] != "WAIT"]
    return {(event["name"], event["tid"], event["args"]["op"]): event for event in found}


def test_processes_are_ranks_and_rows_have_names(tmp_path):
    for rank in range(2):
        record(tmp_path, rank, training(rank, steps=2))
    events = merged(tmp_path)
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert names == {(0, "rank 0 (here, pid 10)"), (1, "rank 1 (here, pid 11)")}
    rows = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert rows == {(rank, row) for rank in range(2) for row in ("g0", "g1", "waits of MainThread")}
    assert {event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"} == {0, 1}


def test_time_begins_with_the_first_event(tmp_path):
    for rank in range(2):
        record(tmp_path, rank, training(rank))
    times = [event["ts"] for event in merged(tmp_path) if event["ph"] == "X"]
    assert min(times) == 0.0
    assert max(times) < 1e6


@settings(deadline=None, max_examples=25)
@given(ahead=st.floats(-1e5, 1e5), drift=st.floats(-1e-4, 1e-4), steps=st.integers(1, 5))
def test_no_skew_or_drift_moves_anything(tmp_path_factory, ahead, drift, steps):
    """A clock that goes wrong, but has been compared twice, gives the trace that a right clock would."""
    right, wrong = tmp_path_factory.mktemp("right"), tmp_path_factory.mktemp("wrong")
    for folder in (right, wrong):
        record(folder, 0, training(0, steps=steps))
    record(right, 1, training(1, steps=steps))
    readings = [Reading(when + ahead, -ahead, 1e-6) for when in (0.0, 1e5)]
    record(wrong, 1, training(1, steps=steps), ahead=ahead, readings=readings)
    there, here = keyed(merged(right), 1), keyed(merged(wrong), 1)
    assert there.keys() == here.keys()
    for key, event in there.items():
        assert here[key]["ts"] == pytest.approx(event["ts"], abs=1.0)
        assert here[key]["dur"] == pytest.approx(event["dur"], abs=0.01)


@settings(deadline=None, max_examples=50)
@given(cut=st.floats(0.2, 1.0))
def test_a_file_that_was_cut_off_anywhere_is_repaired(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    record(folder, 0, training(0))
    path = record(folder, 1, training(1))
    data = path.read_bytes()
    path.write_bytes(data[: int(cut * len(data))])
    events = merged(folder)
    assert len(keyed(events, 0)) == 8 * 5 * 2
    whole = sum(b'"op"' in line for line in path.read_bytes().splitlines() if line.rstrip(b",").endswith(b"}}"))
    assert len(keyed(events, 1)) == whole


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    record(tmp_path, 0, training(0))
    (tmp_path / "timeline.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        merged(tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_ranks_that_recorded_nothing_give_an_empty_trace(tmp_path):
    for rank in range(2):
        record(tmp_path, rank, [])
    assert not [event for event in merged(tmp_path) if event["ph"] != "M"]
