"""The CPU cores that a job may use on this host.

Linux itself provides what `psutil` lacks: the hardware threads of each core, how near cores are to each other, and the
CPU limit of a container. Where that cannot be read, `psutil` counts. This module imports next to nothing, because the
small guard process before every rank imports it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from coordd.host.affinity import read_cpus

__all__ = ["Cores", "cores_here"]

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
_NODES = "/sys/devices/system/node"
_CGROUPS = "/sys/fs/cgroup"


class Cores(NamedTuple):
    """The cores that some processes may use.

    Attributes:
        threads: for every physical core the usable hardware threads; cores that are near each other are adjacent.
        quota: CPU time in cores, if that is less than the cores: a container grants no more, or some of ``threads`` are
            halves of one core.
        binds: whether this system can pin a thread to a core.
    """

    threads: tuple[tuple[int, ...], ...]
    quota: int | None = None
    binds: bool = True

    @property
    def usable(self) -> int:
        """Number of single-threaded ranks that can compute at the same time."""
        return max(1, min(len(self.threads), self.quota or len(self.threads)))

    @property
    def divisible(self) -> bool:
        """Whether ranks can have cores of their own; False where only CPU time is granted."""
        return self.binds and self.usable == len(self.threads)

    def without(self, cpus: frozenset[int]) -> Cores:
        """Returns the cores that have none of these hardware threads; all of them if none would be left."""
        left = tuple(core for core in self.threads if not cpus & set(core))
        return self._replace(threads=left or self.threads)


def cores_here(*pids: int) -> Cores:
    """Returns the cores that processes of this host, by default this one, may use together; skips ended processes."""
    if not hasattr(os, "sched_getaffinity"):
        count = _counted() or os.cpu_count() or 1
        return Cores(tuple((cpu,) for cpu in range(count)), binds=False)
    allowed: set[int] = set()
    for pid in pids or (os.getpid(),):
        with contextlib.suppress(ProcessLookupError):
            allowed |= os.sched_getaffinity(pid)
    siblings = {cpu: _text(_TOPOLOGY.format(cpu, "thread_siblings_list")) for cpu in sorted(allowed)}
    if not all(siblings.values()):  # such as in gVisor, which shows no topology
        counts = [count for count in (_quota(), _counted()) if count]
        return Cores(tuple((cpu,) for cpu in siblings), min(counts, default=None))
    return Cores(_grouped(siblings), _quota())


def _grouped(siblings: dict[int, str]) -> tuple[tuple[int, ...], ...]:
    """Groups hardware threads by core, and orders the cores by package, memory node and number."""
    cores: dict[str, list[int]] = {}
    for cpu, core in siblings.items():
        cores.setdefault(core, []).append(cpu)
    nodes = dict(_nodes())

    def place(core: list[int]) -> tuple[int, int, int]:
        package = _text(_TOPOLOGY.format(core[0], "physical_package_id"))
        return int(package or 0), nodes.get(core[0], 0), core[0]

    return tuple(tuple(core) for core in sorted(cores.values(), key=place))


def _nodes() -> Iterator[tuple[int, int]]:
    """Yields the memory node of every hardware thread, if there are any."""
    for node in sorted(read_cpus(_text(f"{_NODES}/has_cpu") or "0", source=_NODES)):
        if cpus := _text(f"{_NODES}/node{node}/cpulist"):
            yield from ((cpu, node) for cpu in read_cpus(cpus, source=_NODES))


def _counted() -> int | None:
    import psutil  # takes longer to import than all of this, and is rarely needed

    return psutil.cpu_count(logical=False)


def _quota() -> int | None:
    """Returns the lowest CPU limit among this process's control groups (version 2), rounded up to whole cores."""
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


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - see above
            return file.read().strip()
    except OSError:  # not Linux, or a kernel without this file
        return ""
