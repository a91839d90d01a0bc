"""Measures one engine that is initialised and then idle."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from coordd_tools.bench.jobs import IdleJob
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker import meter
from coordd_tools.bench.worker.engines import REDUCERS, started
from coordd_tools.bench.worker.rank import Rank

__all__ = ["measure"]

_SETTLE_SECONDS = 0.5


def measure(job: IdleJob, directory: Path) -> None:
    """Measures the one engine of the job on this rank."""
    torch.set_num_threads(1)
    rank = Rank.join(directory)
    name = job.engines[0]
    with started([REDUCERS[name]()], rank):
        rank.tell(Progress(0, 1, f"{name} · {job.seconds:g} s"))
        rank.barrier()
        time.sleep(_SETTLE_SECONDS)
        block = meter.read(lambda: time.sleep(job.seconds), 1, subject="idle", engine=name)
        rank.barrier()
    rank.save([block])
