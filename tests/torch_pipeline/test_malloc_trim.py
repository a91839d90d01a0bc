"""Memory that splitting a model took is the operating system's again when the pipeline is made."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc: nothing can be done")

_SCRIPT = """
import sys

import torch
from torch import nn

import coordd.torch as cd
from coordd_torch.pipeline.malloc_trim import give_back


def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS:")) >> 10


def builder():
    for _ in range(4):  # what a builder drops lies below what it keeps
        spare = [nn.Linear(256, 250) for _ in range(40)]
        kept = nn.Linear(256, 256)
        del spare
        yield kept


cd.init()
pipe = cd.Pipeline(
    lambda: nn.Sequential(*builder()),
    cd.PipelineConfig(schedule="1f1b", microbatches=1),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    loss=nn.functional.mse_loss,
)
before = resident()
give_back()
print(before - resident())
cd.shutdown()
"""


def test_a_new_pipeline_has_nothing_left_to_give_back() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], check=True, capture_output=True, text=True, timeout=110)
    assert int(done.stdout) < 2
