"""Times the phases from a fresh interpreter to an initialised engine.

Imports are inside the function, because they are timed.
"""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

from coordd_tools.bench.jobs import StartupJob
from coordd_tools.bench.worker import meter

__all__ = ["measure"]


def measure(job: StartupJob, directory: Path) -> None:
    """Measures the one engine of the job on this rank."""
    name = job.engines[0]
    torch = meter.read(lambda: importlib.import_module("torch"), 1, subject="import torch", engine=name)
    mpi = meter.read(lambda: importlib.import_module("mpi4py.MPI"), 1, subject="start MPI", engine=name)

    from coordd_tools.bench.worker.engines import REDUCERS
    from coordd_tools.bench.worker.rank import Rank

    rank = Rank.join(directory)
    engine = REDUCERS[name]()
    gc.collect()  # importing PyTorch defers the first full collection, 0.1 s, to the next allocation
    rank.barrier()  # another rank's slower MPI start must not count for the engine
    init = meter.read(lambda: engine.start(rank), 1, subject="init", engine=name)
    rank.barrier()
    engine.stop()
    rank.save([torch, mpi, init])
