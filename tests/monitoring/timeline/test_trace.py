from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd.errors import TimelineError
from coordd.monitoring.timeline.clock import Reading
from coordd.monitoring.timeline.trace import Trace, find, offset
from tests.monitoring.timeline.recorded import BEGIN, record, training


def told(trace):
    return [msgspec.json.encode(event) for event in trace.events()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return record(tmp_path_factory.mktemp("whole"), 0, training(0))


@settings(deadline=None)
@given(cut=st.integers(0, 20_000), noise=st.binary(max_size=30))
def test_what_was_written_before_a_kill_is_read(whole, tmp_path_factory, cut, noise):
    """Wherever it is cut off, and whatever stands there instead."""
    data = whole.read_bytes()
    cut %= len(data)
    path = tmp_path_factory.mktemp("cut") / "rank.0.json"
    path.write_bytes(data[:cut] + b"\n" + noise)
    lines = data[:cut].count(b"}\n") + data[:cut].count(b"},\n")
    if lines < 3:  # who it is comes third
        return
    trace = Trace(path)
    found = told(trace)
    assert found[:lines] == told(Trace(whole))[:lines]
    assert len(found) <= lines + 1 + len(noise)
    assert trace.first == BEGIN * 1e6 + 59_000 or lines < 9


def test_a_damaged_line_is_left_out_and_counted(whole, tmp_path):
    lines = whole.read_bytes().splitlines(keepends=True)
    lines[12] = b'{"name":"QUEUE","ph":"X",\n'
    lines[14] = b"\xff\xfe\n"
    path = tmp_path / "rank.0.json"
    path.write_bytes(b"".join(lines))
    trace = Trace(path)
    assert trace.damaged == 2
    assert len(told(trace)) == len(told(Trace(whole))) - 2
    assert trace.damaged == 2, "each line counts once"


def test_a_file_that_says_not_whose_it_is_is_refused(tmp_path):
    path = tmp_path / "rank.0.json"
    path.write_text("[\n")
    with pytest.raises(TimelineError, match=r"rank\.0\.json: it does not say"):
        Trace(path)


def test_a_file_that_cannot_be_used_does_not_hide_the_others(tmp_path):
    path = record(tmp_path, 0, training(0))
    broken = tmp_path / "rank.1.json"
    broken.write_bytes(b"")
    assert [trace.path for trace in find(tmp_path)] == [path]
    path.unlink()
    with pytest.raises(TimelineError, match=r"rank\.1\.json"):
        find(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TimelineError, match="no rank has recorded anything there"):
        find(tmp_path)


def test_times_are_those_of_rank_0(tmp_path):
    record(tmp_path, 0, training(0))
    record(tmp_path, 1, training(1), ahead=12345.678)
    first, second = find(tmp_path)
    assert second.first == pytest.approx(first.first, abs=0.01)
    ours, theirs = ([event.ts for event in trace.events()] for trace in (first, second))
    assert theirs == pytest.approx(ours, abs=0.01)


def test_where_clocks_were_not_compared_the_time_of_day_is_taken_and_said(tmp_path):
    record(tmp_path, 0, training(0))
    record(tmp_path, 1, training(1), ahead=500.0, readings=[], host="there")
    first, second = find(tmp_path)
    assert (first.guessed, second.guessed) == (False, True)
    assert second.first == pytest.approx(first.first, abs=1.0)


def test_files_of_an_earlier_job_are_left_alone(tmp_path):
    for rank in range(4):
        path = record(tmp_path, rank, training(rank), size=4, job="an old one")
        os.utime(path, (1, 1))
    for rank in range(2):
        record(tmp_path, rank, training(rank))
    assert [trace.rank for trace in find(tmp_path)] == [0, 1]


READINGS = st.lists(st.tuples(st.floats(0, 1e4), st.floats(-1e-2, 1e-2)), min_size=1, max_size=5)


@given(READINGS, st.floats(-1e3, 2e4))
def test_an_offset_lies_between_its_neighbours(pairs, at):
    readings = [Reading(when, offset, 0.0) for when, offset in sorted(pairs)]
    offsets = [reading.offset for reading in readings]
    assert min(offsets) <= offset(readings, at) <= max(offsets)
    if at <= readings[0].at and readings[0].at < readings[-1].at:
        assert offset(readings, readings[0].at - 1) == offsets[0]
    assert offset(readings, readings[-1].at + 1) == offsets[-1]


def test_a_drift_is_followed():
    readings = [Reading(0.0, 1.0, 0.0), Reading(60.0, 1.6, 0.0)]
    assert offset(readings, 30.0) == pytest.approx(1.3)
