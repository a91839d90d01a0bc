"""Inspects a process of this host from outside, through the operating system, even if the process is stuck."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from coordd.monitoring.stacks import THREAD
from coordd.monitoring.status.probe_result import Life
from coordd.monitoring.status.report import Stack

__all__ = ["Glance", "ancestors", "command", "glance", "stacks"]

_LIVES = {"R": Life.RUNNING, "S": Life.SLEEPING, "I": Life.SLEEPING, "D": Life.BLOCKED, "T": Life.STOPPED}
_LIVES |= {"t": Life.TRACED, "Z": Life.DEAD, "X": Life.DEAD}
_TICK = os.sysconf("SC_CLK_TCK")
_SPY_SECONDS = 5.0


class Glance(NamedTuple):
    """State of a process, the CPU seconds that it has used, and its parent's process id."""

    life: Life
    seconds: float = 0.0
    parent: int = 0


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Thread(msgspec.Struct):
    frames: list[_Frame]
    thread_name: str | None = None


def glance(pid: int) -> Glance:
    """Reads the state of a process from ``/proc``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return Glance(Life.DEAD)
    return Glance(_LIVES.get(fields[0], Life.UNKNOWN), (int(fields[11]) + int(fields[12])) / _TICK, int(fields[1]))


def ancestors(pid: int) -> Iterator[int]:
    """Yields the ids of a process, its parent, and so on up."""
    while pid > 0:
        yield pid
        pid = glance(pid).parent


def command(pid: int) -> str:
    """Returns the command line of a process; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def stacks(pid: int) -> tuple[Stack, ...]:
    """Reads the Python stacks of a process that does not answer with ``py-spy``; empty if that is not installed."""
    if (spy := shutil.which("py-spy")) is None:
        return ()
    order = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        told = subprocess.run(order, capture_output=True, timeout=_SPY_SECONDS, check=True).stdout
        threads = msgspec.json.decode(told, type=list[_Thread])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):  # py-spy may lack permission
        return ()
    mine = [thread for thread in threads if not (thread.thread_name or "").startswith(THREAD)]
    return tuple(Stack(thread.thread_name or "a thread", _lines(thread)) for thread in mine)


def _lines(thread: _Thread) -> tuple[str, ...]:
    return tuple(f"{frame.filename}:{frame.line} in {frame.name}" for frame in reversed(thread.frames))
