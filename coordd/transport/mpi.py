"""MPI data plane over mpi4py: any MPI library, one thread, non-blocking calls only.

The daemon's thread initialises MPI here, unless the script has done so. MPI is finalised when the interpreter exits,
but never after a failure, because ``MPI_Finalize`` may then wait for ever, nor while a thread is still inside MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from coordd.errors import StartError
from coordd.host.launcher_environment import launched_ranks
from coordd.transport.bootstrap import Bootstrap
from coordd.transport.protocol import Ticket

__all__ = ["MpiTransport", "launched_ranks"]

_NO_SHARED_MEMORY = {"OMPI_MCA_btl": "^sm", "MPIR_CVAR_NOLOCAL": "1", "I_MPI_FABRICS": "ofi"}
"""Settings that make Open MPI, MPICH and Intel MPI treat ranks of one host like ranks of several hosts."""
_NO_PORTS = {"OMPI_MCA_btl": "^tcp"}
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


class MpiLane:
    """One communicator."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._test_all = mpi.Request.Testall
        self.tags: int = min(communicator.Get_attr(mpi.TAG_UB), 1 << 30) + 1

    def isend(self, array: np.ndarray, destination: int, tag: int) -> Ticket:
        """Starts a send; as bytes, because MPI does not know every dtype that coordd supports."""
        return self._communicator.Isend((array.view(np.uint8), self._mpi.BYTE), destination, tag)

    def irecv(self, array: np.ndarray, source: int, tag: int) -> Ticket:
        """Starts a receive."""
        source = self._mpi.ANY_SOURCE if source < 0 else source
        return self._communicator.Irecv((array.view(np.uint8), self._mpi.BYTE), source, tag)

    def done(self, tickets: Sequence[Ticket]) -> bool:
        """Drives MPI; returns whether all messages are complete."""
        return bool(self._test_all(tickets))

    def cancel(self, ticket: Ticket) -> None:
        """Withdraws a receive; it is complete afterwards."""
        ticket.Cancel()
        ticket.Free()

    def free(self) -> None:
        """Frees the communicator, in step with the other ranks."""
        self._communicator.Free()


class MpiTransport:
    """All ranks of ``MPI_COMM_WORLD``, on two communicators of coordd's own."""

    def __init__(self) -> None:
        """Joins the other ranks; blocks until they are there.

        Raises:
            StartError: mpi4py is missing, or the MPI library does not match the launcher or does not allow threads.
            PeerError: one of these conditions holds on another rank.
        """
        _users.add(self)
        try:
            self._join()
        except BaseException:
            _users.discard(self)
            raise

    def _join(self) -> None:
        mpi = _library()
        self._world = mpi.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        communicators = [self._world.Dup(), self._world.Dup()]
        for communicator in communicators:
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
        self._communicator = communicators[0]
        self.collective, self.matched = (MpiLane(mpi, communicator) for communicator in communicators)
        start = Bootstrap(self.gather)
        with start.shared():
            _check(mpi, self.size)
        start.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Exchanges one small value with all ranks; blocks.

        Goes up a binomial tree and down again with messages: Open MPI's own collectives hang if two hosts have the same
        name.
        """
        known = {self.rank: value}
        below, step = [], 1
        while step < self.size and not self.rank & step:
            if self.rank + step < self.size:
                below.append(self.rank + step)
                known |= self._communicator.recv(source=below[-1], tag=self.collective.tags - 1)
            step *= 2
        if self.rank:
            self._communicator.send(known, self.rank - step, tag=self.collective.tags - 1)
            known = self._communicator.recv(source=self.rank - step, tag=self.collective.tags - 1)
        for child in reversed(below):
            self._communicator.send(known, child, tag=self.collective.tags - 1)
        return [known[rank] for rank in range(self.size)]

    def close(self, *, failed: bool) -> None:
        """Frees the communicators; after a failure it leaves them, and MPI, alone."""
        global _abandoned  # noqa: PLW0603 - MPI itself is one a process
        _abandoned = failed
        if not failed:
            self.collective.free()
            self.matched.free()
        _users.discard(self)


_users: set[MpiTransport] = set()
"""Transports that a thread may still use: it may be inside MPI, even inside its initialisation."""
_begun = False
_abandoned = False


def _library() -> Any:
    """Imports mpi4py and initialises MPI with thread support, once per process."""
    try:
        import mpi4py
    except ImportError as error:
        text = "the ranks were started by an MPI launcher, but mpi4py is missing: pip install 'coordd[mpi]'"
        raise StartError(text) from error
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        atexit.register(_finalize, os.getpid())
        with _fitting_ways():
            _initialise(MPI)
        global _begun  # noqa: PLW0603 - MPI itself is one a process
        _begun = True
    return MPI


def _check(mpi: Any, size: int) -> None:
    """Checks that the MPI library fits.

    Raises:
        StartError: it does not; the text says what to do.
    """
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        text = (
            "MPI runs without support for threads, but coordd uses it from its own: initialise it with "
            "MPI_THREAD_MULTIPLE, or let coordd.init() come before the first use of mpi4py"
        )
        raise StartError(text)
    expected = launched_ranks(os.environ)
    if expected > size:
        flavour = mpi.Get_library_version().split(",")[0].split("\n")[0]
        text = (
            f"the launcher has started {expected} ranks, but mpi4py uses {flavour} and sees {size}: start the "
            "script with the launcher of that MPI, or install mpi4py for the MPI of the launcher"
        )
        raise StartError(text)


def _initialise(mpi: Any) -> None:
    """Initialises MPI with thread support; waits for the other ranks, but lets this process's other threads run.

    mpi4py's own call holds the GIL while it waits, so no other thread could give up, handle an interrupt, or answer a
    status query.

    Raises:
        StartError: MPI returns an error.
    """
    begin = getattr(ctypes.CDLL(mpi.__file__), "MPI_Init_thread", None)
    if begin is None:  # linked in such a way that its functions cannot be found
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    if code := begin(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int())):
        raise StartError(f"MPI cannot be initialised: {mpi.Get_error_string(code)}")
    for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does; it turns errors into exceptions
        communicator.Set_errhandler(mpi.ERRORS_RETURN)


@contextmanager
def _fitting_ways() -> Iterator[None]:
    """Makes MPI use the transports that exist between the ranks while it is initialised.

    The user's settings take precedence.

    MPI trusts its launcher that ranks are on one host. If each rank is in a container of its own, two of them may have
    the same process id, from which Open MPI derives the name of its shared memory, and both would write to the same
    memory. Otherwise, if all ranks are on one host, Open MPI needs no TCP port: every rank would listen on all
    interfaces and accept connections from any process until it has no descriptor left.
    """
    if _contained(Path("/proc/1/environ"), os.environ):
        wanted = _NO_SHARED_MEMORY
    elif _all_here(os.environ) and _shares_memory_files(os.getppid()):
        wanted = _NO_PORTS
    else:
        wanted = {}
    chosen = any(name in os.environ for name in ("OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl"))
    added = {
        name: value
        for name, value in wanted.items()
        if name not in os.environ and not (chosen and name.startswith("OMPI_"))
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _all_here(environment: Mapping[str, str]) -> bool:
    """Returns whether Open MPI's launcher has started all ranks on this host."""
    size, local = (environment.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("SIZE", "LOCAL_SIZE"))
    return size == local != ""


def _shares_memory_files(process: int) -> bool:
    """Returns whether this process has the same ``/dev/shm`` as its ancestor processes, as far as it may see theirs."""
    with suppress(OSError, IndexError, ValueError):
        own = Path("/dev/shm").stat().st_dev  # noqa: S108 - where Open MPI's memory lies
        while process:
            if Path(f"/proc/{process}/root/dev/shm").stat().st_dev != own:
                return False
            process = int(Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    return True


def _contained(first: Path, environment: Mapping[str, str]) -> bool:
    """Returns whether the first process of this container was started by the MPI launcher as this rank.

    Args:
        first: the environment of that process, a file in ``/proc``.
        environment: this process's environment.
    """
    numbers = [f"{name}={environment[name]}" for name in _RANK_VARIABLES if name in environment]
    try:
        found = first.read_bytes().split(b"\0")
    except OSError:  # owned by another user: not a container of this rank
        return False
    return any(number.encode() in found for number in numbers)


def _finalize(pid: int) -> None:
    """Finalises MPI at exit, in the process that initialised it, unless a thread is still inside it."""
    if os.getpid() != pid:
        return
    if _users:
        _skip_exit_handlers()
        return
    from mpi4py import MPI

    if _begun and not _abandoned and not MPI.Is_finalized():
        MPI.Finalize()


def _skip_exit_handlers() -> None:
    """Ends the process right after the interpreter.

    The exit handlers of libraries would free memory that MPI still uses.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc only; handlers run last registered first, with the exit status
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # noqa: SLF001 - that is its name
