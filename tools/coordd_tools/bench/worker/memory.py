"""Trains one model with one engine, and watches the process's memory meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import MemoryJob
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker.engines import TRAINERS, started
from coordd_tools.bench.worker.rank import Rank
from coordd_tools.bench.worker.step import Training

__all__ = ["measure"]

_EVERY_SECONDS = 10e-3
_STEPS = 12


class _Watch(threading.Thread):
    """Samples the proportional set size until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            self.peak = max(self.peak, _proportional_bytes())

    def stop(self) -> int:
        """Ends it, and returns the highest sample."""
        self._over.set()
        self.join()
        return max(self.peak, _proportional_bytes())


def measure(job: MemoryJob, directory: Path) -> None:
    """Measures the one engine and model of the job on this rank."""
    torch.set_num_threads(1)
    rank = Rank.join(directory)
    name, model = job.engines[0], job.models[0]
    with started([TRAINERS[name]()], rank) as (engine,):
        rank.tell(Progress(0, 1, f"{model} · {name}"))
        training = Training(model, engine, rank, seed=job.seed)
        rank.barrier()
        watch = _Watch()
        watch.start()
        for _ in range(_STEPS):
            training.step()
        peak = watch.stop()
        rank.barrier()
    gradients = sum(parameter.nbytes for parameter in training.model.parameters())
    rank.save([Block(model, name, (1.0,), peak_bytes=peak, gradient_bytes=gradients)])


def _proportional_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not tell a process's proportional set size")
