"""The rank, size, local rank and local size of a process, from the environment variables of its MPI launcher.

One rule: only the variables of the launcher that started the process are read. A batch script already has Slurm's
variables, which do not describe the ranks that it starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Place", "place"]


class Place(NamedTuple):
    """A process's rank among all ranks, and its local rank among the ranks of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def in_horovods_words(self, host: str) -> dict[str, str]:
        """Returns the variables that ``horovodrun`` sets.

        With several hosts a rank does not know its cross rank and cross size before `init`, so they are left out.
        """
        found = {f"HOROVOD_{name.upper()}": str(value) for name, value in self._asdict().items()}
        found["HOROVOD_HOSTNAME"] = host
        if self.size == self.local_size:
            found |= {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
        return found


def place(style: str, environment: Mapping[str, str]) -> Place:
    """Reads the place from the environment.

    Args:
        style: the launcher's set of variables: ``open-mpi``, ``hydra``, ``slurm``, or ``alone`` for no launcher.
        environment: usually ``os.environ``.

    Raises:
        KeyError: the launcher did not set a variable; the key is its name.
    """
    return _STYLES[style](environment)


def _open_mpi(environment: Mapping[str, str]) -> Place:
    prefix = "OMPI_COMM_WORLD_"
    return Place(*(int(environment[prefix + name]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


def _hydra(environment: Mapping[str, str]) -> Place:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return Place(*(int(environment[name]) for name in names))


def _slurm(environment: Mapping[str, str]) -> Place:
    sizes = _tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    return Place(
        int(environment["SLURM_PROCID"]),
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_LOCALID"]),
        sizes[int(environment["SLURM_NODEID"])],
    )


def _alone(_: Mapping[str, str]) -> Place:
    return Place(0, 1, 0, 1)


def _tasks_per_node(text: str) -> list[int]:
    """Expands Slurm's shorthand: ``2(x3),1`` means two tasks on each of three nodes, then one task on one node."""
    counts: list[int] = []
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeat or 1)
    return counts


_STYLES: dict[str, Callable[[Mapping[str, str]], Place]] = {
    "open-mpi": _open_mpi,
    "hydra": _hydra,
    "slurm": _slurm,
    "alone": _alone,
}
