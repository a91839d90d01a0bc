"""What a process has in memory now, and had at most, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["RETURNED", "forget_peak", "peak", "resident", "shared"]

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables with which glibc gives the memory of a tensor back as soon as it is freed, so that it can be counted."""


def resident() -> int:
    """Bytes that are in memory now, shared ones included."""
    return _status("VmRSS")


def shared() -> int:
    """Those of them that lie in memory that other processes may have, too."""
    return _status("RssShmem")


def peak() -> int:
    """The most that there ever were, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Makes what is in memory now the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
