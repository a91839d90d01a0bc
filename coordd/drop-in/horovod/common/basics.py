"""`init` with Horovod's arguments, and the questions about how it was built, answered truly."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from coordd import api
from coordd.errors import ArgumentError
from coordd.host.launcher_environment import launched_ranks
from coordd.parallel.grid import ProcessSet
from horovod.common.timeline import start_timeline, stop_timeline

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
]


_AS_HOROVOD = "COORDD_AS_HOROVOD"  # as `coordd run --as-horovod` sets it; here for other launchers, and for children


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Starts coordd so that it behaves as Horovod, and sets ``HOROVOD_RANK`` and its like for whoever reads them.

    Args:
        comm: None, a list of all ranks, or an mpi4py communicator of all ranks.
        process_sets: None, ``"dynamic"``, or a list of sets, which are only checked: none need be announced.

    Raises:
        ArgumentError: ``comm`` leaves ranks out, or a process set has ranks that do not exist.
        ConfigError, StartError: as `coordd.init`.
    """
    _check_communicator(comm)
    sets = _read_sets(process_sets)
    os.environ[_AS_HOROVOD] = "1"
    api.init()
    for each in sets:
        _check_set(each, api.size())
    os.environ.update(_place())


def _check_communicator(comm: Any) -> None:
    size = api.size() if api.is_initialized() else launched_ranks(os.environ) or 1
    if comm is None or (isinstance(comm, Sequence) and list(comm) in ([], list(range(size)))):
        return
    if comm and hasattr(comm, "Get_size") and _has_all(comm):
        return
    text = (
        f"init(comm={comm!r}): coordd runs on all {size} ranks that were launched; call init() on each, and give "
        "operations process_set=hvd.ProcessSet([...])"
    )
    raise ArgumentError(text)


def _has_all(communicator: Any) -> bool:
    from mpi4py import MPI

    return MPI.Comm.Compare(communicator, MPI.COMM_WORLD) in {MPI.IDENT, MPI.CONGRUENT}


def _read_sets(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return []
    if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
        text = f"init(process_sets={process_sets!r}): give None, 'dynamic', or a list of hvd.ProcessSet"
        raise ArgumentError(text)
    return [each if isinstance(each, ProcessSet) else _of_ranks(getattr(each, "ranks", each)) for each in process_sets]


def _of_ranks(ranks: Any) -> ProcessSet:
    try:
        return ProcessSet(ranks)
    except ArgumentError as error:
        text = f"init(process_sets=[{ranks!r}]): a process set is made of ranks, as in hvd.ProcessSet([0, 1]): {error}"
        raise ArgumentError(text) from error


def _check_set(process_set: ProcessSet, size: int) -> None:
    if process_set.ranks and process_set.ranks[-1] >= size:
        text = f"init(): process set {process_set.ranks} has ranks that do not exist in a world of {size}"
        raise ArgumentError(text)


def _place() -> dict[str, str]:
    asked = (api.rank, api.size, api.local_rank, api.local_size, api.cross_rank, api.cross_size)
    return {f"HOROVOD_{ask.__name__.upper()}": str(ask()) for ask in asked}


def mpi_built(verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Says whether MPI can be used: whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Says whether this process uses MPI."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def mpi_threads_supported() -> bool:
    """Says whether MPI may be called from several threads, so that the script may use mpi4py beside coordd.

    Raises:
        NotInitializedError: before `init`.
    """
    api.operations()
    if not mpi_enabled():
        return False
    module = sys.modules["mpi4py.MPI"]
    return bool(module.Query_thread() == module.THREAD_MULTIPLE)


def gloo_enabled() -> bool:
    """Says no."""
    return False


def nccl_built(verbose: bool = False) -> int:  # noqa: ARG001 - Horovod's signature
    """Gives no version of NCCL: tensors of a GPU travel by way of the host."""
    return 0


def _not_built(verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Says no: coordd is not compiled, and uses none of these."""
    return False


ccl_built = cuda_built = ddl_built = gloo_built = rocm_built = _not_built
