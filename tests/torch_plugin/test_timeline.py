from __future__ import annotations

import json

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.training import batch, model, plain_step, wrapped


def test_a_training_tells_its_buckets_and_that_it_waits_for_gradients(tmp_path):
    def body(rank):
        cd.start_timeline(str(tmp_path / "run.json"))
        net = model()
        optimizer = wrapped(net)
        for step in range(6):
            plain_step(net, optimizer, *batch(rank, step))
        cd.stop_timeline()

    each_rank(2, body)
    for rank in range(2):
        events = json.loads((tmp_path / "run" / f"rank.{rank}.json").read_text())
        rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        moved = [rows[event["tid"]] for event in events if event["name"] == "ALLREDUCE"]
        assert moved.count("gradients.0") >= 4
        assert {event["args"]["for"] for event in events if event["name"] == "WAIT"} >= {"gradients"}
