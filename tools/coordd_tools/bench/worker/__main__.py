"""Runs one rank: reads the job, measures, writes the blocks; a failure ends the whole group.

This module imports no framework, because the ``startup`` job times that.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from coordd.host.affinity import DAEMON_CORES, write_cpus
from coordd.host.cores import cores_here
from coordd.launch.place import place
from coordd.launch.shares import Wish, divide
from coordd_tools.bench import jobs


def main() -> int:
    """Runs the job in the directory that the parent passed."""
    directory = Path(sys.argv[1])
    job = jobs.loads((directory / "job.json").read_text())
    try:
        _bind()
        importlib.import_module(f"coordd_tools.bench.worker.{job.noun}").measure(job, directory)
    except BaseException:  # noqa: BLE001 - the other ranks would wait for this one forever
        traceback.print_exc()
        _abort()
        return 1
    return 0


def _bind() -> None:
    """Binds this rank to its share of the cores, as `coordd run` does, so that all engines have equal conditions."""
    here = place("open-mpi" if "OMPI_COMM_WORLD_RANK" in os.environ else "hydra", os.environ)
    share = divide(cores_here(), here.local_rank, here.local_size, Wish(threads=1))
    if here.size > 1 and share.bound_to:
        os.sched_setaffinity(0, share.bound_to)
        os.environ[DAEMON_CORES] = write_cpus(share.daemon_on)


def _abort() -> None:
    """Ends all ranks if MPI has been started; before that, the launcher does it when this rank exits."""
    if mpi := sys.modules.get("mpi4py.MPI"):
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


raise SystemExit(main())
