"""SIGTERM to one rank of a pipeline that `fit` trains: all save, and leave."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.launch.started import Started
from tests.launch.test_run import mpi

pytestmark = [*mpi, pytest.mark.slow]

TRAIN = """
import os, sys
import torch
from torch import nn
import coordd.torch as cd

class Told(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        super().step()
        self.steps += 1
        if self.steps == 1:
            print("ready", os.getpid(), flush=True)

cd.init()
torch.manual_seed(0)  # all ranks have the same rows
x, y = torch.randn(8, 4), torch.randn(8, 1)
pipe = cd.Pipeline(
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
    cd.PipelineConfig(microbatches=2),
    optimizer=lambda parameters: Told(parameters, lr=1e-3),
    loss=nn.functional.mse_loss,
)
pipe.fit(x, y, epochs=10**9, batch_size=4, leave=True, verbose=False)
pipe.save(sys.argv[1])
print("left after step", pipe.optimizers[0].steps, flush=True)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_sent_to_one_rank_has_all_save_and_leave_after_the_same_step(tmp_path, victim):
    script, folder = tmp_path / "train.py", tmp_path / "checkpoint"
    script.write_text(TRAIN)
    with Started("-n", 2, sys.executable, script, folder) as job:
        job.wait_for_ranks(2)
        pids = [int(line.split()[-1]) for line in sorted(job.out.splitlines()) if "ready" in line]
        os.kill(pids[victim], signal.SIGTERM)
        assert job.wait() == 0
        steps = [int(line.split()[-1]) for line in job.out.splitlines() if "left after step" in line]
        assert len(steps) == 2
        assert len(set(steps)) == 1
        assert json.loads((folder / "manifest.json").read_text())["metadata"]["steps"] == steps[0]
        assert not job.err.splitlines()[1:]
