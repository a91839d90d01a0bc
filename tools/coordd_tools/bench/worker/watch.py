"""Samples the memory of this process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["Watch", "allocated_bytes", "proportional_bytes"]

_EVERY_SECONDS = 10e-3
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Watch(threading.Thread):
    """A thread that samples a number of bytes until it is stopped."""

    def __init__(self, read: Callable[[], int], *, every: float = _EVERY_SECONDS) -> None:
        """Takes the function to sample and the interval in seconds."""
        super().__init__(daemon=True)
        self._over = threading.Event()
        self._read = read
        self._every = every
        self.peak = 0

    def run(self) -> None:
        """Samples repeatedly; runs in the thread."""
        while not self._over.wait(self._every):
            self.peak = max(self.peak, self._read())

    def stop(self) -> int:
        """Stops the thread and returns the highest sample, in bytes."""
        self._over.set()
        self.join()
        return max(self.peak, self._read())


def proportional_bytes() -> int:
    """Returns the proportional set size in bytes; shared pages count by their share.

    Raises:
        RuntimeError: the system does not report it.
    """
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not tell a process's proportional set size")


def allocated_bytes() -> int:
    """Returns the bytes that the C library has allocated and not freed, tensors included; 0 without glibc >= 2.33."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)
