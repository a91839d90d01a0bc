"""The present and peak memory of a process, as reported by Linux."""

from __future__ import annotations

from pathlib import Path

__all__ = ["RETURNED", "forget_peak", "peak", "resident", "shared"]

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables that make glibc return the memory of a tensor as soon as it is freed, so that measurements see it."""


def resident() -> int:
    """Returns the resident bytes, shared ones included."""
    return _status("VmRSS")


def shared() -> int:
    """Returns the resident bytes of shared memory (``RssShmem``)."""
    return _status("RssShmem")


def peak() -> int:
    """Returns the peak of the resident bytes, since the start or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Resets the peak to the present resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
