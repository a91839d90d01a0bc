"""Trains one model with one engine and samples the memory of the process meanwhile."""

from __future__ import annotations

from pathlib import Path

import torch

from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import MemoryJob
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker.engines import TRAINERS, started
from coordd_tools.bench.worker.rank import Rank
from coordd_tools.bench.worker.step import Training
from coordd_tools.bench.worker.watch import Watch, proportional_bytes

__all__ = ["measure"]

_STEPS = 12


def measure(job: MemoryJob, directory: Path) -> None:
    """Measures the one engine and model of the job on this rank."""
    torch.set_num_threads(1)
    rank = Rank.join(directory)
    name, model = job.engines[0], job.models[0]
    with started([TRAINERS[name]()], rank) as (engine,):
        rank.tell(Progress(0, 1, f"{model} · {name}"))
        training = Training(model, engine, rank, seed=job.seed)
        rank.barrier()
        watch = Watch(proportional_bytes)
        watch.start()
        for _ in range(_STEPS):
            training.step()
        peak = watch.stop()
        rank.barrier()
    gradients = sum(parameter.nbytes for parameter in training.model.parameters())
    rank.save([Block(model, name, (1.0,), peak_bytes=peak, gradient_bytes=gradients)])
