"""Measures the memory that steps of a pipeline add on each rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

import coordd.torch as cd
from coordd_tools.stages.memory import forget_peak, peak, resident, shared

__all__ = ["measure"]

_WIDTH, _ROWS, _LAYERS = 256, 2048, 4
_WARM, _STEPS = 2, 2


def measure(*, schedule: str, microbatches: int) -> list[int]:
    """Returns, by rank, the bytes that a step adds."""
    torch.set_num_threads(1)
    cd.init()
    torch.manual_seed(1)  # the same model on all ranks
    # Inputs and outputs are narrow: a batch of more microbatches is larger, and all ranks have it.
    ends = nn.Linear(1, _WIDTH), nn.Linear(_WIDTH, 1)
    inner = [layer for _ in range(_LAYERS * cd.size() // 2 - 1) for layer in (nn.Tanh(), nn.Linear(_WIDTH, _WIDTH))]
    model = nn.Sequential(ends[0], *inner, nn.Tanh(), ends[1])
    config = cd.PipelineConfig(
        layers_per_proc=[len(model) - _LAYERS * (cd.size() - 1), *[_LAYERS] * (cd.size() - 1)][::-1],
        microbatches=microbatches,
        schedule=schedule,
    )
    pipe = cd.Pipeline(model, config, optimizer=lambda mine: torch.optim.SGD(mine, lr=1e-3), loss=mse_loss)
    x, y = torch.zeros(microbatches * _ROWS, 1), torch.zeros(microbatches * _ROWS, 1)
    alone = shared()
    for _ in range(_WARM):
        pipe.train_batch(x, y)
    added = []
    for _ in range(_STEPS):
        before = resident() - (shared() - alone)  # the memory of messages stays between steps, but counts for the step
        forget_peak()
        pipe.train_batch(x, y)
        added.append(peak() - before)
    peaks = cd.allgather_object(max(added))
    cd.shutdown()
    return list(peaks)
