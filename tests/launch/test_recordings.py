"""What a run has recorded becomes one file when it ends, and never changes how it ends."""

from __future__ import annotations

import json
import sys

import pytest

from coordd.launch import timeline
from coordd.launch.recordings import Recordings
from tests.launch.started import Started
from tests.launch.test_run import mpi
from tests.monitoring.timeline.recorded import record, training

SCRIPT = """
import numpy as np
from coordd import api
api.init()
for _ in range(5):
    api.allreduce(np.ones(9, np.float32), name="weight")
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "trace"


def recorded(folder, *ranks, **about):
    for rank in ranks:
        record(folder, rank, training(rank), **about)


def test_what_a_run_has_recorded_is_merged_as_the_command_does(tmp_path):
    folder = tmp_path / "my trace"
    recordings = Recordings(folder)
    recorded(folder, 0, 1)
    assert recordings.merged() == (
        f"the timeline of all ranks: {folder}/timeline.json, for https://ui.perfetto.dev; "
        f"'coordd timeline '{folder}'' says where a step went"
    )
    merged = (folder / "timeline.json").read_bytes()
    timeline.collect(folder)
    assert (folder / "timeline.json").read_bytes() == merged


def test_recordings_that_lack_ranks_say_so(folder):
    recordings = Recordings(folder)
    recorded(folder, 0, 2, size=4)
    assert recordings.merged().startswith("the timeline of 2 of 4 ranks: ")


def test_without_new_recordings_nothing_is_said_and_nothing_is_left(folder):
    assert Recordings(folder).merged() == ""
    recorded(folder, 0, 1)
    recordings = Recordings(folder)
    assert recordings.merged() == recordings.unmerged() == ""
    assert not (folder / "timeline.json").exists()


def test_where_there_is_no_time_the_command_is_told(folder):
    recordings = Recordings(folder)
    recorded(folder, 0)
    assert recordings.unmerged().startswith("the timeline is not merged (there was no time): 'coordd timeline ")
    assert not (folder / "timeline.json").exists()


@pytest.mark.parametrize("trouble", [OSError("no space left"), KeyError("size"), KeyboardInterrupt()])
def test_trouble_becomes_a_sentence(folder, monkeypatch, trouble):
    def fail(_):
        raise trouble

    recordings = Recordings(folder)
    recorded(folder, 0)
    monkeypatch.setattr(timeline, "collect", fail)
    assert recordings.merged().startswith(f"the timeline is not merged ({str(trouble) or 'interrupted'}): '")


def test_a_file_of_somebody_else_is_no_recording(folder):
    recordings = Recordings(folder)
    folder.mkdir()
    (folder / "rank.0.json").write_text("[]")
    assert "it does not say which rank has written it" in recordings.merged()


class TestTwoRanks:
    pytestmark = mpi

    @pytest.mark.parametrize(
        ("end", "code", "last"),
        [
            ("", 0, ""),
            ("if api.rank(): raise ValueError('bad')", 1, "coordd: rank 1 exited with code 1: ValueError: bad"),
        ],
    )
    def test_leave_one_file_however_they_end(self, folder, end, code, last):
        with Started("-n", 2, "--timeline", folder, sys.executable, "-c", SCRIPT + end) as job:
            assert job.wait() == code
            told = next(line for line in job.err.splitlines() if "the timeline of all ranks: " in line)
            assert job.last == (last or told)
            assert str(folder / "timeline.json") in told
        names = {event["name"] for event in json.loads((folder / "timeline.json").read_text("utf-8"))}
        assert "ALLREDUCE" in names

    def test_that_record_nothing_keep_their_exit_code(self, folder):
        recorded(folder, 0, 1)
        with Started("-n", 2, "--timeline", folder, "sh", "-c", "exit 3") as job:
            assert job.wait() == 3
            assert "timeline" not in job.err
