"""A timeline of real ranks: every rank has every phase of every tensor, and one file tells of all of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from coordd.launch.cli import main
from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

_TRAINING = """
import os, signal, sys
import torch
import coordd.torch as cd

cd.init()
if sys.argv[1:] == ["called"] and cd.rank() == 0:
    cd.start_timeline(os.environ["FOLDER"] + ".json", mark_cycles=True)
cd.barrier()
for step in range(12):
    handles = [cd.allreduce_async(torch.ones(3), name=f"w{n}") for n in range(4)]
    handles += [cd.allreduce_async(torch.ones(100_000), name="large")]
    for handle in handles:
        cd.synchronize(handle)
    cd.broadcast(torch.ones(3), 0, name="b")
    cd.allgather(torch.ones(cd.rank() + 1), name="g")
cd.barrier()
if sys.argv[1:] == ["killed"]:
    path = os.path.join(os.environ["COORDD_TIMELINE"], f"rank.{cd.rank()}.json")
    while open(path).read().count('"name":"BARRIER"') < 2:  # the writer comes once a second
        pass
    os.kill(os.getpid(), signal.SIGKILL)
cd.shutdown()
"""
_NAMES = {"w0", "w1", "w2", "w3", "large", "b", "g"}
_KINDS = {"b": "BROADCAST", "g": "ALLGATHER"}


def _phases(path: Path) -> dict[int, dict[str, defaultdict[str, int]]]:
    """How often each phase of each row comes, by rank."""
    events = json.loads(path.read_text())
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[int, dict[str, defaultdict[str, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for event in events:
        if event["ph"] != "M":
            found[event["pid"]][rows[event["pid"], event["tid"]]][event["name"]] += 1
    return found


def _check(path: Path, *, atleast: int = 12) -> None:
    found = _phases(path)
    assert set(found) == {0, 1}
    for rank, rows in found.items():
        for name in _NAMES:
            wanted = {"NEGOTIATE", "QUEUE", "FUSE", _KINDS.get(name, "ALLREDUCE"), "UNFUSE"}
            assert rows[name].keys() == wanted, (rank, name)
            assert min(rows[name].values()) >= atleast, (rank, name, rows[name])
        assert rows["waits of MainThread"]["WAIT"] > 0, rank


@pytest.mark.parametrize("way", [{}, {"COORDD_SIMULATE_HOSTS": "2"}], ids=["host", "hosts"])
def test_every_rank_has_every_phase_of_every_tensor(tmp_path: Path, way: dict[str, str], capsys) -> None:
    outcome = launch(2, _TRAINING, variables={"HOROVOD_TIMELINE": f"{tmp_path}/trace.json", **way})
    assert outcome.returncode == 0, repr(outcome)
    assert main(["timeline", str(tmp_path / "trace")]) == 0
    told = capsys.readouterr()
    assert "damaged" not in told.err
    assert "clock was not compared" not in told.err
    assert told.out.startswith("a step takes ")
    _check(tmp_path / "trace" / "timeline.json")


def test_one_rank_may_start_it_for_all(tmp_path: Path) -> None:
    outcome = launch(2, _TRAINING, "called", variables={"FOLDER": str(tmp_path / "trace")})
    assert outcome.returncode == 0, repr(outcome)
    assert main(["timeline", str(tmp_path / "trace")]) == 0
    path = tmp_path / "trace" / "timeline.json"
    _check(path)
    assert all(rows["daemon"]["CYCLE"] > 12 for rows in _phases(path).values())


def test_what_was_recorded_outlives_a_kill(tmp_path: Path) -> None:
    outcome = launch(2, _TRAINING, "killed", variables={"COORDD_TIMELINE": str(tmp_path / "trace")})
    assert outcome.returncode != 0
    for rank in range(2):
        assert not (tmp_path / "trace" / f"rank.{rank}.json").read_text().rstrip().endswith("]")
    assert main(["timeline", str(tmp_path / "trace")]) == 0
    _check(tmp_path / "trace" / "timeline.json")


def test_a_folder_that_cannot_be_made_ends_nothing_but_the_recording(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    outcome = launch(2, _TRAINING, variables={"COORDD_TIMELINE": str(tmp_path / "file" / "trace")})
    assert outcome.returncode == 0, repr(outcome)
    text = outcome.stdout + outcome.stderr
    assert text.count("the timeline ends here, the training goes on") == 2, repr(outcome)
