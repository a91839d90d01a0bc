"""Reads from the environment which launcher started this process, and as one of how many.

Everything here is a pure function of the environment; nothing opens a connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = ["RANK_PID", "Claim", "identifying", "launched_ranks", "more_ranks"]

RANK_PID = "_COORDD_RANK_PID"
"""Holds the process id of a rank; processes that the rank starts inherit the variable and are not ranks."""

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE")
_PROCESS_MANAGER = ("PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_SPAWNED", "PMI2_SPAWNED")
_IDENTIFYING = (
    *("OMPI_COMM_WORLD_", "OMPI_APP_CTX_", "OMPI_NUM_APP_CTX", "OMPI_FIRST_RANKS", "OMPI_UNIVERSE_SIZE", "OMPI_WORLD_"),
    *("PMIX_", "PMI_", "PMI2_", "MV2_COMM_WORLD_", "MVP_COMM_WORLD_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SETTINGS = ("PMIX_MCA_", "PMIX_PREFIX", "PMIX_INSTALL_PREFIX")  # set by the user, or the library's location

_MPI = "an MPI launcher"
_NUMBERS = (
    ("OMPI_COMM_WORLD_RANK", _MPI),
    ("PMI_RANK", _MPI),
    ("MV2_COMM_WORLD_RANK", _MPI),
    ("MVP_COMM_WORLD_RANK", _MPI),
    ("MPI_LOCALRANKID", _MPI),
    ("MPIRUN_RANK", _MPI),
    ("MP_CHILD", "IBM's poe"),
    ("PALS_RANKID", "Cray's PALS"),
    ("ALPS_APP_PE", "Cray's aprun"),
    ("JSM_NAMESPACE_RANK", "jsrun"),
    ("FLUX_TASK_RANK", "Flux"),
    ("HOROVOD_RANK", "horovodrun"),
    ("PBS_VNODENUM", "pbsdsh"),
    ("PBS_NODENUM", "pbsdsh"),
)
"""Variables that count from 0: a value above 0 means that there is more than one process."""
_SIZES = (
    ("MPIRUN_NPROCS", "MPIRUN_RANK", _MPI),
    ("PALS_NRANKS", "PALS_RANKID", "Cray's PALS"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "Flux"),
    ("HOROVOD_SIZE", "HOROVOD_RANK", "horovodrun"),
    ("LSB_DJOB_NUMPROC", "LSF_PM_TASKID", "LSF's blaunch"),  # alone it is the size of the reservation
)
"""Variables with the number of processes, valid where a second variable shows that this process is one of them."""


class Claim(NamedTuple):
    """A variable that makes this process one of several: its name, its value, how many processes, and what sets it."""

    variable: str
    value: str
    ranks: int
    launcher: str


def launched_ranks(environment: Mapping[str, str]) -> int:
    """Returns how many ranks the MPI launcher has started; 0 if this process was not started by one.

    PMIx alone does not give a process the count; the result is 1 then, and MPI knows the real number.
    """
    for variable in _SIZE_VARIABLES:
        if found := _number(environment, variable):
            return found
    if any(name in environment for name in _PROCESS_MANAGER):
        return _number(environment, "SLURM_STEP_NUM_TASKS") or int("PMIX_RANK" in environment)
    return 0


def more_ranks(environment: Mapping[str, str], size: int) -> Claim | None:
    """Finds a variable that claims more processes than this process's world has ranks.

    Batch system variables count only where no MPI launcher has started the process: an MPI launcher may itself be
    started by ``srun`` or ``pbsdsh``, once per host, and its ranks inherit those variables.

    Args:
        environment: usually ``os.environ``.
        size: ranks of the world.
    """
    found = [*_of_torchrun(environment)]
    if not launched_ranks(environment):
        found += [*_of_slurm(environment), *_of_sizes(environment), *_of_numbers(environment), *_of_tasks(environment)]
    return next((claim for claim in found if claim.ranks > size), None)


def identifying(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which an MPI launcher gives one process its rank and where to connect."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_IDENTIFYING) and not name.startswith(_SETTINGS)
    }


def _of_torchrun(environment: Mapping[str, str]) -> Iterator[Claim]:
    if "RANK" in environment:
        yield Claim("WORLD_SIZE", environment.get("WORLD_SIZE", ""), _number(environment, "WORLD_SIZE"), "torchrun")


def _of_slurm(environment: Mapping[str, str]) -> Iterator[Claim]:
    """Reads a step of Slurm; SLURM_NTASKS alone is the reservation's, in which a batch script runs once.

    A terminal (``srun --pty``) belongs to the first task, and the other tasks have nothing to read.
    """
    if "SLURM_PTY_PORT" in environment:
        return
    size = "SLURM_STEP_NUM_TASKS"
    if "SLURM_STEP_ID" in environment and size not in environment:
        size = "SLURM_NTASKS"
    for name, more in ((size, 0), ("SLURM_PROCID", 1)):
        yield Claim(name, environment.get(name, ""), _number(environment, name) + more, "srun")


def _of_sizes(environment: Mapping[str, str]) -> Iterator[Claim]:
    for name, member, launcher in _SIZES:
        if member in environment:
            yield Claim(name, environment.get(name, ""), _number(environment, name), launcher)


def _of_numbers(environment: Mapping[str, str]) -> Iterator[Claim]:
    for name, launcher in _NUMBERS:
        yield Claim(name, environment.get(name, ""), _number(environment, name) + 1, launcher)


def _of_tasks(environment: Mapping[str, str]) -> Iterator[Claim]:
    """Reads variables that count from 1, the batch script being the first task, and TensorFlow's cluster."""
    for name, launcher in (("PBS_TASKNUM", "pbsdsh"), ("LSF_PM_TASKID", "LSF's blaunch")):
        yield Claim(name, environment.get(name, ""), _number(environment, name), launcher)
    text = environment.get("TF_CONFIG", "")
    yield Claim("TF_CONFIG", text, _workers(text), "TensorFlow's cluster")


def _workers(text: str) -> int:
    """Counts the workers of TensorFlow's cluster that includes this process; 0 if there is none."""
    try:
        found = json.loads(text)
        workers = [*found["cluster"].get("chief", ()), *found["cluster"].get("worker", ())]
        return len(workers) if found["task"]["type"] in {"chief", "worker"} else 0
    except (ValueError, LookupError, TypeError, AttributeError):  # no cluster, or another library's
        return 0


def _number(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0
