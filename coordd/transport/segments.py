"""Memory that the ranks of one host see in common: blocks of one rank, mapped by its neighbours.

A block has no name in any file system: neighbours open it through its owner's ``/proc`` entry. So nothing is left
behind however a process ends, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

__all__ = ["Heap", "attach", "lasting", "nameless"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class Heap:
    """One rank's blocks, by number; no number comes twice."""

    def __init__(self, *, announce: Callable[[int, int, int], None], room: int) -> None:
        """Starts empty.

        Args:
            announce: tells neighbours of a block: number, file descriptor, bytes; descriptor -1 takes it back.
            room: how many blocks they can be told of at a time; the numbers of two never differ by a multiple of it.
        """
        self._announce = announce
        self._room = room
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._places: list[tuple[int, int, int]] = []  # address, bytes, number; by address
        self._gone: deque[int] = deque()

    def allocate(self, size: int) -> np.ndarray:
        """Returns a new block of one byte or more, all zero, as a flat array; freed with the last view of it.

        Raises:
            OSError: there is no memory, no file descriptor, or no room in the neighbours' lists.
        """
        descriptor = nameless(size)
        try:
            memory = _mapped(descriptor, size)
            number = self._enter(ctypes.addressof(memory), size)
        except BaseException:
            os.close(descriptor)
            raise
        self._announce(number, descriptor, size)
        weakref.finalize(memory, self._free, number, descriptor).atexit = False
        return np.frombuffer(memoryview(memory), np.uint8)

    @property
    def size(self) -> int:
        """Bytes in use, or freed a moment ago."""
        return sum([size for _, size, _ in self._places])

    def locate(self, array: np.ndarray) -> tuple[int, int] | None:
        """Finds the block in which a contiguous array lies, and the offset in bytes; None if it lies elsewhere."""
        if not self._places:
            return None
        start = _address(array)
        with self._lock:
            self._sweep()
            found = bisect.bisect(self._places, (start, 1 << 62, 0)) - 1
            if found < 0:
                return None
            address, size, number = self._places[found]
        return (number, start - address) if start + array.nbytes <= address + size else None

    def _enter(self, address: int, size: int) -> int:
        """Notes where a block lies; returns its number."""
        with self._lock:
            self._sweep()
            taken = {number % self._room for _, _, number in self._places}
            if len(taken) == self._room:
                text = f"{self._room} blocks of common memory are in use already"
                raise OSError(text)
            found = next(number for number in self._numbers if number % self._room not in taken)
            bisect.insort(self._places, (address, size, found))
        return found

    def _free(self, number: int, descriptor: int) -> None:
        """Gives the memory back at once, though neighbours may still map what is now empty.

        Runs wherever the last view dies, perhaps in the garbage collector of a thread that holds the lock, so it takes
        none. In a forked child it does nothing, for the memory is the parent's.
        """
        if os.getpid() != self._pid:
            return
        self._announce(number, -1, 0)
        os.ftruncate(descriptor, 0)
        os.close(descriptor)
        self._gone.append(number)

    def _sweep(self) -> None:
        """Forgets the places of freed blocks, before anything else comes to lie there; with the lock held."""
        while self._gone:
            gone = self._gone.popleft()
            self._places = [place for place in self._places if place[2] != gone]


def attach(pid: int, descriptor: int, size: int, *, populate: bool = True) -> np.ndarray:
    """Maps a block of a process on this host; ``populate`` wants all of its pages now.

    Raises:
        OSError: the process is gone, cannot be seen from here, belongs to another user, or is another one here.
    """
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size < size:
            text = f"file {descriptor} of process {pid} is no block of {size} bytes here"
            raise OSError(text)
        return np.frombuffer(memoryview(_mapped(opened, size, populate=populate)), np.uint8)
    finally:
        os.close(opened)


def nameless(size: int) -> int:
    """Makes memory, all zero, that no file system knows, and returns its descriptor.

    Raises:
        OSError: there is no memory, or no file descriptor.
    """
    descriptor = os.memfd_create("coordd", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def lasting(size: int) -> tuple[np.ndarray, int]:
    """Makes memory, all zero, that stays as long as any process maps it, and its descriptor, for others to `attach`.

    Raises:
        OSError: there is no memory, or no file descriptor.
    """
    descriptor = nameless(size)
    try:
        return np.frombuffer(memoryview(_mapped(descriptor, size, populate=False)), np.uint8), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _mapped(descriptor: int, size: int, *, populate: bool = True) -> ctypes.Array[ctypes.c_uint8]:
    """Maps, by default with all pages present, for a page fault costs as much as copying the page.

    Not by Python's own ``mmap``, which keeps a file descriptor for each mapping: many ranks a host would run out.
    """
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False  # after what is registered later
    return memory


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
