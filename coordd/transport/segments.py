"""Memory that the ranks of one host see in common: blocks of one rank, mapped by its neighbours.

A block has no name in any file system: neighbours open it through its owner's ``/proc`` entry. So nothing is left
behind however a process ends, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np

__all__ = ["Heap", "attach"]


class Heap:
    """One rank's blocks, by number."""

    def __init__(self, *, announce: Callable[[int, int, int], None]) -> None:
        """Starts empty.

        Args:
            announce: tells neighbours of a block: number, file descriptor, bytes; descriptor -1 takes it back.
        """
        self._announce = announce
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._places: list[tuple[int, int, int]] = []  # address, bytes, number; by address

    def allocate(self, size: int) -> np.ndarray:
        """Returns a new block of ``size`` bytes, zero, as a flat array; freed with the last view of it."""
        descriptor = os.memfd_create("coordd", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = _mapped(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        block = np.frombuffer(memory, np.uint8)
        with self._lock:
            number = next(self._numbers)
            bisect.insort(self._places, (_address(block), size, number))
        self._announce(number, descriptor, size)
        weakref.finalize(memory, self._free, number, descriptor).atexit = False
        return block

    def locate(self, array: np.ndarray) -> tuple[int, int] | None:
        """Finds the block in which a contiguous array lies, and the offset in bytes; None if it lies elsewhere."""
        if not self._places:
            return None
        start = _address(array)
        with self._lock:
            found = bisect.bisect(self._places, (start, 1 << 62, 0)) - 1
            if found < 0:
                return None
            address, size, number = self._places[found]
        return (number, start - address) if start + array.nbytes <= address + size else None

    def _free(self, number: int, descriptor: int) -> None:
        """Gives the memory back at once, though neighbours may still map what is now empty."""
        with self._lock:
            self._places = [place for place in self._places if place[2] != number]
        self._announce(number, -1, 0)
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def attach(pid: int, descriptor: int, size: int, *, populate: bool = True) -> np.ndarray:
    """Maps a block of a process on this host; ``populate`` wants all of its pages now.

    Raises:
        OSError: the process is gone, cannot be seen from here, or belongs to another user.
    """
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(_mapped(opened, size, populate=populate), np.uint8)
    finally:
        os.close(opened)


def _mapped(descriptor: int, size: int, *, populate: bool = True) -> mmap.mmap:
    """Maps, by default with all pages present, for a page fault costs as much as copying the page."""
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0))


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
