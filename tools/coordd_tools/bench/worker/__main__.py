"""Starts one rank: reads the job, measures, leaves the blocks; a failure ends the whole group.

No framework is imported here: the ``startup`` job still has to time that.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from coordd_tools.bench import jobs


def main() -> int:
    """Runs the job in the directory that the parent named."""
    directory = Path(sys.argv[1])
    job = jobs.loads((directory / "job.json").read_text())
    try:
        importlib.import_module(f"coordd_tools.bench.worker.{job.noun}").measure(job, directory)
    except BaseException:  # noqa: BLE001 - whatever it is, the other ranks would wait for this one for ever
        traceback.print_exc()
        _abort()
        return 1
    return 0


def _abort() -> None:
    """Ends all ranks, where MPI has been started; before that, the launcher does it when this one exits."""
    if mpi := sys.modules.get("mpi4py.MPI"):
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


raise SystemExit(main())
