"""Watches the memory of this process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["Watch", "allocated_bytes", "proportional_bytes"]

_EVERY_SECONDS = 10e-3
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Watch(threading.Thread):
    """Samples a number of bytes until it is stopped."""

    def __init__(self, read: Callable[[], int], *, every: float = _EVERY_SECONDS) -> None:
        """Takes what is to be read, and how many seconds lie between two readings."""
        super().__init__(daemon=True)
        self._over = threading.Event()
        self._read = read
        self._every = every
        self.peak = 0

    def run(self) -> None:
        """Reads, again and again; the thread's own."""
        while not self._over.wait(self._every):
            self.peak = max(self.peak, self._read())

    def stop(self) -> int:
        """Ends it, and returns the highest sample."""
        self._over.set()
        self.join()
        return max(self.peak, self._read())


def proportional_bytes() -> int:
    """The proportional set size, in which pages in common count by their share.

    Raises:
        RuntimeError: the system does not tell.
    """
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not tell a process's proportional set size")


def allocated_bytes() -> int:
    """What the C library has allocated and not freed, so all tensors and arrays; 0 if it is not glibc 2.33 or newer."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)
