"""Dividing a host's cores among its ranks.

One rule: ranks of one host never get more threads than the host has cores for us, hyper-threads not counted. A rank is
bound to its share only where the share has at least two cores: with one, the kernel places compute thread and daemon
better than we could.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["Cores", "Share", "cores_here", "divide", "thread_variables"]

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
_CGROUPS = "/sys/fs/cgroup"


class Cores(NamedTuple):
    """What this process may use.

    Attributes:
        threads: for every physical core the hardware threads that are ours.
        quota: how many cores' worth of time the container grants, if that is limited.
    """

    threads: tuple[tuple[int, ...], ...]
    quota: int | None = None

    @property
    def usable(self) -> int:
        """How many ranks of one thread can compute at the same time."""
        return max(1, min(len(self.threads), self.quota or len(self.threads)))


class Share(NamedTuple):
    """What one rank gets: a number of threads, and the hardware threads to stay on (empty: any)."""

    threads: int
    bound_to: tuple[int, ...] = ()


def divide(cores: Cores, local_rank: int, local_size: int) -> Share:
    """Computes the share of one of ``local_size`` ranks on a host."""
    threads = max(1, cores.usable // local_size)
    limited = cores.usable < len(cores.threads)
    if threads < 2 or limited or local_size == 1:
        return Share(threads)
    first, last = (len(cores.threads) * rank // local_size for rank in (local_rank, local_rank + 1))
    return Share(threads, tuple(sorted(cpu for core in cores.threads[first:last] for cpu in core)))


def thread_variables(threads: int, environment: Mapping[str, str], *, insist: bool) -> dict[str, str]:
    """Picks the variables that tell OpenMP, MKL, OpenBLAS and TensorFlow their threads.

    Args:
        threads: threads per rank.
        environment: what is set already, which wins.
        insist: the user asked for this number, which wins over the environment.
    """
    if insist:
        names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"]
        return dict.fromkeys(names, str(threads))
    if "OMP_NUM_THREADS" in environment:
        return {}
    names = ["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"]  # MKL and OpenBLAS follow OMP_NUM_THREADS
    return {name: str(threads) for name in names if name not in environment}


def cores_here() -> Cores:
    """Reads affinity, topology and container quota of this process."""
    if hasattr(os, "sched_getaffinity"):
        allowed: Iterable[int] = os.sched_getaffinity(0)
    else:
        allowed = range(os.cpu_count() or 1)
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed):
        package = _number(_TOPOLOGY.format(cpu, "physical_package_id"), default=0)
        core = _number(_TOPOLOGY.format(cpu, "core_id"), default=cpu)
        cores.setdefault((package, core), []).append(cpu)
    return Cores(tuple(tuple(cores[key]) for key in sorted(cores)), _quota())


def _quota() -> int | None:
    """Reads the tightest CPU limit among our control groups (version 2), rounded up to whole cores."""
    limits = []
    folder = _CGROUPS + _group()
    while folder.startswith(_CGROUPS):
        quota, _, period = _text(f"{folder}/cpu.max").partition(" ")
        if quota.isdecimal():
            limits.append(-(-int(quota) // int(period)))
        folder = os.path.dirname(folder)  # noqa: PTH120 - pathlib takes longer to import than all of this
    return min(limits, default=None)


def _group() -> str:
    lines = _text("/proc/self/cgroup").splitlines()
    return next((line[3:].rstrip("/") for line in lines if line.startswith("0::")), "")


def _number(path: str, *, default: int) -> int:
    text = _text(path)
    return int(text) if text else default


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - see above
            return file.read().strip()
    except OSError:  # another system, or a kernel without this file
        return ""
