"""The MPI data plane, by mpi4py: any MPI library, one thread, non-blocking calls only.

MPI is initialised here, by the daemon's thread, unless the script has done so; it is finalised when the interpreter
exits, and never after a failure, because ``MPI_Finalize`` may then wait for ever.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coordd.errors import StartError
from coordd.transport.protocol import Ticket

__all__ = ["MpiTransport", "launched_ranks"]

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")


def launched_ranks(environment: Mapping[str, str]) -> int:
    """Says how many ranks the MPI launcher has started; 0 if this process was not started by one."""
    for variable in _SIZE_VARIABLES:
        if environment.get(variable, "").isdigit():
            return int(environment[variable])
    if environment.get("SLURM_STEP_NUM_TASKS", "").isdigit() and _has_process_manager(environment):
        return int(environment["SLURM_STEP_NUM_TASKS"])
    return 0


def _has_process_manager(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_SPAWNED", "PMI2_SPAWNED"))


class MpiLane:
    """One communicator."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._test_all = mpi.Request.Testall
        self.tags: int = min(communicator.Get_attr(mpi.TAG_UB), 1 << 30) + 1

    def isend(self, array: np.ndarray, destination: int, tag: int) -> Ticket:
        """Starts to send; bytes, because MPI does not know every type that we do."""
        return self._communicator.Isend((array.view(np.uint8), self._mpi.BYTE), destination, tag)

    def irecv(self, array: np.ndarray, source: int, tag: int) -> Ticket:
        """Starts to receive."""
        source = self._mpi.ANY_SOURCE if source < 0 else source
        return self._communicator.Irecv((array.view(np.uint8), self._mpi.BYTE), source, tag)

    def done(self, tickets: Sequence[Ticket]) -> bool:
        """Drives MPI."""
        return bool(self._test_all(tickets))

    def cancel(self, ticket: Ticket) -> None:
        """Withdraws a receive; it is complete afterwards."""
        ticket.Cancel()
        ticket.Free()

    def free(self) -> None:
        """Gives the communicator back, in step with the other ranks."""
        self._communicator.Free()


class MpiTransport:
    """All ranks of ``MPI_COMM_WORLD``, on two communicators of our own."""

    def __init__(self) -> None:
        """Joins the other ranks; blocks until they are there.

        Raises:
            StartError: mpi4py is missing, or the MPI library does not fit the launcher or allows no threads.
        """
        mpi = _library()
        self._world = mpi.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        expected = launched_ranks(os.environ)
        if expected > self.size:
            flavour = mpi.Get_library_version().split(",")[0].split("\n")[0]
            text = (
                f"the launcher has started {expected} ranks, but mpi4py uses {flavour} and sees {self.size}: start the "
                "script with the launcher of that MPI, or install mpi4py for the MPI of the launcher"
            )
            raise StartError(text)
        communicators = [self._world.Dup(), self._world.Dup()]
        for communicator in communicators:
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
        self.collective, self.matched = (MpiLane(mpi, communicator) for communicator in communicators)

    def gather(self, value: Any) -> list[Any]:
        """Exchanges one small value with all ranks; blocks."""
        found: list[Any] = self._world.allgather(value)
        return found

    def close(self, *, failed: bool) -> None:
        """Frees the communicators; after a failure it leaves them, and MPI, alone for ever."""
        if failed:
            _abandon()
            return
        self.collective.free()
        self.matched.free()


_finalizing = False


def _library() -> Any:
    """Imports mpi4py and initialises MPI with threads, once a process."""
    try:
        import mpi4py
    except ImportError as error:
        text = "the ranks were started by an MPI launcher, but mpi4py is missing: pip install 'coordd[mpi]'"
        raise StartError(text) from error
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        _initialise(MPI)
        global _finalizing  # noqa: PLW0603 - MPI itself is one a process
        _finalizing = True
        atexit.register(_finalize, os.getpid())
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        text = (
            "MPI runs without support for threads, but coordd uses it from its own: initialise it with "
            "MPI_THREAD_MULTIPLE, or let coordd.init() come before the first use of mpi4py"
        )
        raise StartError(text)
    return MPI


def _initialise(mpi: Any) -> None:
    """Initialises MPI with threads; waits for the other ranks, but lets this process's other threads go on.

    mpi4py's own call keeps Python's lock while it waits, so that nobody could give up, be interrupted, or be asked.

    Raises:
        StartError: MPI gives an error.
    """
    begin = getattr(ctypes.CDLL(mpi.__file__), "MPI_Init_thread", None)
    if begin is None:  # linked in such a way that its functions cannot be found
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    if code := begin(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int())):
        raise StartError(f"MPI cannot be initialised: {mpi.Get_error_string(code)}")
    for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does, whose errors are exceptions
        communicator.Set_errhandler(mpi.ERRORS_RETURN)


def _finalize(pid: int) -> None:
    """Ends MPI at exit, in the process that began it."""
    from mpi4py import MPI

    if _finalizing and os.getpid() == pid and not MPI.Is_finalized():
        MPI.Finalize()


def _abandon() -> None:
    """Keeps everybody from finalising MPI."""
    global _finalizing  # noqa: PLW0603 - MPI itself is one a process
    _finalizing = False
    import mpi4py

    mpi4py.rc.finalize = False
