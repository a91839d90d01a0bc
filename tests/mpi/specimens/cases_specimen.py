"""One specimen of every fate that a case can meet."""

import os
import signal
import sys
import threading

from mpi4py import MPI

from tests.mpi.cases import ranks


def case_passes() -> None:
    """Takes part in a collective."""
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


@ranks(2)
def case_fails_on_rank_1() -> None:
    """Prints on every rank and is wrong on one."""
    rank = MPI.COMM_WORLD.rank
    print(f"written by {rank}")  # noqa: T201 - the harness has to show it
    value = 41
    assert rank == 0 or value == 42


@ranks(2)
def case_fails_while_rank_0_waits() -> None:
    """Leaves rank 0 alone in a collective."""
    if MPI.COMM_WORLD.rank == 1:
        sys.exit(7)
    MPI.COMM_WORLD.Barrier()


@ranks(2, deadline=1)
def case_hangs() -> None:
    """Waits for ever, without MPI."""
    _wait_for_nobody()


@ranks(2)
def case_dies_on_rank_1() -> None:
    """Loses rank 1 to a signal."""
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.Barrier()


@ranks(2)
def case_fails_and_tells_the_session_folder() -> None:
    """Fails on all ranks, so that the launcher is killed."""
    raise RuntimeError(os.environ["PMIX_SERVER_TMPDIR"])


def _wait_for_nobody() -> None:
    threading.Event().wait()
