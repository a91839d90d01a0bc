"""The MPI data plane, by mpi4py: any MPI library, one thread, non-blocking calls only.

MPI is initialised here, by the daemon's thread, unless the script has done so; it is finalised when the interpreter
exits, and never after a failure, because ``MPI_Finalize`` may then wait for ever, nor while a thread is still inside.
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

from coordd.bootstrap import Bootstrap
from coordd.errors import StartError
from coordd.launched import launched_ranks
from coordd.transport.protocol import Ticket

__all__ = ["MpiTransport", "launched_ranks"]

_NO_SHARED_MEMORY = {"OMPI_MCA_btl": "^sm", "MPIR_CVAR_NOLOCAL": "1", "I_MPI_FABRICS": "ofi"}
"""What tells Open MPI, MPICH and Intel MPI to treat ranks of one host as ranks of several."""
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
            PeerError: one of these holds on another rank.
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

        Up a binomial tree and down again, by messages: Open MPI's own collectives hang where two hosts have one name.
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
"""Those that some thread may still use: it may be inside MPI, even inside its initialisation."""
_begun = False
_abandoned = False


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
        atexit.register(_finalize, os.getpid())
        with _fitting_ways():
            _initialise(MPI)
        global _begun  # noqa: PLW0603 - MPI itself is one a process
        _begun = True
    return MPI


def _check(mpi: Any, size: int) -> None:
    """Refuses an MPI library that does not fit.

    Raises:
        StartError: naming what to do.
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


@contextmanager
def _fitting_ways() -> Iterator[None]:
    """Has MPI use the ways between ranks that there are, while it is initialised; what the user has set stays.

    MPI believes its launcher that ranks are on one host. Where each is in a container of its own, two of them may have
    the same process number, after which Open MPI names its memory, and both would write to the same. Else, where all
    ranks are on one host, Open MPI needs no TCP port: every rank would listen on all interfaces, and accept connections
    of anybody until it has no descriptor left.
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
    """Says whether Open MPI's launcher has started all ranks on this host."""
    size, local = (environment.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("SIZE", "LOCAL_SIZE"))
    return size == local != ""


def _shares_memory_files(process: int) -> bool:
    """Says whether this process has the ``/dev/shm`` of those that have started it, as far as it may look at them."""
    with suppress(OSError, IndexError, ValueError):
        own = Path("/dev/shm").stat().st_dev  # noqa: S108 - where Open MPI's memory lies
        while process:
            if Path(f"/proc/{process}/root/dev/shm").stat().st_dev != own:
                return False
            process = int(Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    return True


def _contained(first: Path, environment: Mapping[str, str]) -> bool:
    """Says whether the first process of this container is one that the MPI launcher has started, as this rank.

    Args:
        first: the environment of that process, as the kernel shows it.
        environment: this process's.
    """
    numbers = [f"{name}={environment[name]}" for name in _RANK_VARIABLES if name in environment]
    try:
        found = first.read_bytes().split(b"\0")
    except OSError:  # another user's: no container of this rank
        return False
    return any(number.encode() in found for number in numbers)


def _finalize(pid: int) -> None:
    """Ends MPI at exit, in the process that began it, unless a thread is still inside it."""
    if os.getpid() != pid:
        return
    if _users:
        _skip_exit_handlers()
        return
    from mpi4py import MPI

    if _begun and not _abandoned and not MPI.Is_finalized():
        MPI.Finalize()


def _skip_exit_handlers() -> None:
    """Has the process end right after the interpreter: libraries' exit handlers would free what MPI still uses."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # of glibc; what is registered last is called first, with the exit status
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # noqa: SLF001 - that is its name
