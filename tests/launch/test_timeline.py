from __future__ import annotations

import csv
import json
import os

import pytest

from coordd.launch.cli import main
from coordd.monitoring.timeline.clock import Reading
from tests.monitoring.timeline.recorded import record, training


@pytest.fixture
def folder(tmp_path):
    for rank in range(2):
        record(tmp_path / "trace", rank, training(rank, late=0.025))
    return tmp_path / "trace"


def test_one_command_answers_and_leaves_three_files(folder, capsys):
    assert main(["timeline", str(folder)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("a step takes 100.00 ms: ")
    assert not told.err
    assert len(json.loads((folder / "timeline.json").read_text())) > 100
    assert "<svg" in (folder / "step.svg").read_text()
    with (folder / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    assert {row["rank"] for row in rows if float(row["late_ms"]) > 20} == {"0"}
    parts = [name for name in rows[0] if name.endswith("_ms") and name != "step_ms"]
    for row in rows:
        assert sum(float(row[part]) for part in parts) == pytest.approx(float(row["step_ms"]), abs=0.01)


def test_horovods_name_of_a_file_is_that_of_the_folder(folder):
    assert main(["timeline", f"{folder}.json"]) == 0


def test_asking_again_gives_the_same(folder):
    main(["timeline", str(folder)])
    once = (folder / "timeline.json").read_bytes()
    main(["timeline", str(folder)])
    assert (folder / "timeline.json").read_bytes() == once


def test_flaws_are_told(folder, capsys):
    record(folder, 1, training(1), readings=[], host="there")
    path = folder / "rank.1.json"
    path.write_bytes(path.read_bytes()[:-40])
    record(folder, 0, training(0), size=4)
    record(folder, 1, training(1), size=4, readings=[], host="there")
    path.write_bytes(path.read_bytes()[:-40] + b"\n")
    assert main(["timeline", str(folder)]) == 0
    told = capsys.readouterr().err
    assert "2 of 4 ranks have no usable recording here, rank 2 for one" in told
    assert "rank 1: 1 damaged or cut off lines are left out" in told
    assert "rank 1: its clock was not compared with rank 0's" in told


def test_clocks_that_are_not_known_well_are_told(folder, capsys):
    record(folder, 1, training(1), readings=[Reading(0.0, 0.0, 0.0053)])
    assert main(["timeline", str(folder)]) == 0
    assert "rank 1: its times may be off by up to 5.3 ms" in capsys.readouterr().err


def test_without_steps_there_is_still_a_trace(tmp_path, capsys):
    for rank in range(2):
        record(tmp_path, rank, training(rank, steps=1))
    assert main(["timeline", str(tmp_path)]) == 0
    assert "no step was found: nothing comes twice on all ranks" in capsys.readouterr().out
    assert json.loads((tmp_path / "timeline.json").read_text())


def test_steps_may_be_told_by_a_tensor(folder, capsys):
    assert main(["timeline", "--step", "g1", str(folder)]) == 0
    assert "known by 'g1'" in capsys.readouterr().out
    assert main(["timeline", "--step", "g3x", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("coordd: --step: no tensor 'g3x' was recorded; what was is called g")


def test_a_folder_without_recordings_is_a_clear_error(tmp_path, capsys):
    assert main(["timeline", str(tmp_path)]) == 1
    assert "no rank has recorded anything there" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_a_clear_error(folder, capsys):
    folder.chmod(0o500)
    assert main(["timeline", str(folder)]) == 1
    assert "Permission denied" in capsys.readouterr().err
