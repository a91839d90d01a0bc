"""Times the steps of the paper's network, trained in stages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import coordd.torch as cd
from coordd_tools.stages.cnn import SIDE, Took, network, stand_in
from coordd_tools.stages.speedup import MICROBATCHES, ROWS

__all__ = ["measure"]

_WARM = 1


def measure(
    *, took: Sequence[Mapping[str, Any]] | None, layers: Sequence[int], replicas: int, schedule: str, steps: int
) -> list[float] | None:
    """Returns the seconds of each step on rank 0, else None; without ``took`` the layers compute, else they sleep."""
    torch.set_num_threads(1)
    cd.init()
    torch.manual_seed(1)  # the same model on all ranks
    model = (
        network() if took is None else stand_in([Took(**{**each, "output": tuple(each["output"])}) for each in took])
    )
    config = cd.PipelineConfig(
        layers_per_proc=layers, microbatches=MICROBATCHES, schedule=schedule, data_parallel=replicas
    )
    pipe = cd.Pipeline(model, config, optimizer=lambda mine: torch.optim.SGD(mine, lr=0.01), loss=cross_entropy)
    rows = MICROBATCHES * ROWS * replicas
    x, y = torch.zeros(rows, 1, SIDE, SIDE), torch.zeros(rows, dtype=torch.long)
    seconds = []
    for _ in range(_WARM + steps):
        begin = time.perf_counter()
        pipe.train_batch(x, y)
        seconds.append(time.perf_counter() - begin)
    first = cd.rank() == 0
    cd.shutdown()
    return seconds[_WARM:] if first else None
