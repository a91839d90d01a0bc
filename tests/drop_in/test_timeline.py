"""`start_timeline` writes the file that Horovod's does."""

from __future__ import annotations

import json

import pytest

from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

_SCRIPT = """
import sys
import horovod.torch as hvd
import torch

hvd.init()
for turn, cycles in enumerate((True, False)):
    path = sys.argv[1] + str(turn)
    hvd.start_timeline(path, mark_cycles=cycles)
    for name in ("a", "b"):
        hvd.allreduce(torch.ones(3), name=name)
    hvd.broadcast(torch.ones(2), 0, name="c")
    hvd.barrier()
    if turn == 0:
        hvd.stop_timeline()
        if hvd.rank() == 0:
            print("there", open(path).read()[:1])
"""


def test_rank_0_writes_one_file_with_a_process_for_each_tensor(tmp_path):
    """When it is stopped, or when the process ends; what all ranks have recorded lies beside it."""
    outcome = launch(2, _SCRIPT, str(tmp_path / "timeline"), launcher="as-horovod", timeout=100)
    assert outcome.returncode == 0, str(outcome)
    assert "there [" in outcome.stdout
    for turn in range(2):
        events = json.loads((tmp_path / f"timeline{turn}").read_text())
        assert events[0]["args"]["start_time_since_epoch_in_micros"] > 1e15
        rows = {event["args"]["name"]: event["pid"] for event in events[1:] if event["name"] == "process_name"}
        assert {"allreduce.a", "allreduce.b", "broadcast.c"} <= rows.keys()
        mine = [event for event in events if event["pid"] == rows["allreduce.a"] and event["ph"] in "BE"]
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= {event["name"] for event in mine}
        ends = [event["args"] for event in mine if event["ph"] == "E" and event["name"] == "ALLREDUCE"]
        assert ends == [{"dtype": "float32", "shape": "[3]"}]
        assert any(event["name"] == "CYCLE_START" for event in events) == (turn == 0)
        assert sorted(path.name for path in (tmp_path / f"timeline{turn}.ranks").glob("rank.*.json")) == [
            "rank.0.json",
            "rank.1.json",
        ]
