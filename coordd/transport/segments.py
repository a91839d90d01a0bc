"""Memory that the ranks of one host see in common: blocks of one rank, mapped by its neighbours.

A block has no name in any file system: neighbours open it through its owner's ``/proc`` entry. So nothing is left
behind however a process ends, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from coordd.forks import close_in_children, forks

__all__ = ["RESERVE_BYTES", "Heap", "attach", "lasting", "made_private", "nameless"]

log = logging.getLogger("coordd")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_PAGE_BYTES = 4096
_MAP_FIXED = 0x10  # on Linux; Python does not name it
RESERVE_BYTES = (1 << 30) + _PAGE_BYTES
"""What the reserve has of addresses; pages are taken when they are used, so it is never mapped with all of them."""


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
        self._descriptors: dict[int, int] = {}  # by number
        self._gone: deque[int] = deque()
        self._reserve: np.ndarray | None = None
        self._reserved = 0
        self._told = False
        close_in_children(self)

    def allocate(self, size: int) -> np.ndarray:
        """Returns a new block of one byte or more, all zero, as a flat array; freed with the last view of it.

        Raises:
            OSError: there is no memory, no file descriptor, or no room in the neighbours' lists.
        """
        return self._allocate(size, populate=True)

    def _allocate(self, size: int, *, populate: bool) -> np.ndarray:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if len(self._descriptors) > limit // 2 > 0:  # the script opens files, too; an unlimited number is negative
            raise OSError(errno.EMFILE, f"half of the {limit} files that may be open are common memory")
        descriptor = nameless(size)
        try:
            memory = _mapped(descriptor, size, populate=populate)
            number = self._enter(ctypes.addressof(memory), size)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptors[number] = descriptor
        self._announce(number, descriptor, size)
        weakref.finalize(memory, self._free, number, descriptor, forks()).atexit = False
        return np.frombuffer(memoryview(memory), np.uint8)

    def lay_by(self) -> None:
        """Makes the block of which `from_reserve` gives parts, while there are file descriptors; the first of all."""
        with contextlib.suppress(OSError):  # addresses may be limited (ulimit -v)
            self._reserve = self._allocate(RESERVE_BYTES, populate=False)

    def tell(self, error: OSError) -> None:
        """Warns, once, that there is no more common memory."""
        if not self._told:
            self._told = True
            text = "this rank gets no more common memory, and does with what it has, more slowly: %s; try ulimit -n"
            log.warning(text, error)

    def from_reserve(self, size: int) -> np.ndarray:
        """Returns memory, all zero, that needs no new file descriptor and cannot be given back; for one thread.

        Raises:
            OSError: nothing is left of it.
        """
        start, self._reserved = self._reserved, self._reserved + -(-size // _PAGE_BYTES) * _PAGE_BYTES
        if self._reserve is None or self._reserved > self._reserve.size:
            self._reserved = start
            text = f"this rank cannot get {size} bytes of common memory: raise the limit on open files (ulimit -n)"
            raise OSError(errno.EMFILE, text)
        return self._reserve[start : start + size]

    def close_in_child(self) -> None:
        """Has what a forked child writes to these blocks change its own copy alone, as with all other memory.

        What it has not written may still show what its parent writes later.
        """
        for address, size, number in list(self._places):  # without the lock, which a thread may have held
            if (descriptor := self._descriptors.get(number)) is not None:
                flags = mmap.MAP_PRIVATE | _MAP_FIXED
                _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)

    def close(self) -> None:
        """Gives the reserve back, when nothing of it is in use any more; other blocks go with their last views."""
        self._reserve = None

    @property
    def size(self) -> int:
        """Bytes in use, or freed a moment ago; of the reserve what was taken."""
        reserve = 0 if self._reserve is None else self._reserve.size - self._reserved
        return sum([size for _, size, _ in self._places]) - reserve

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

    def _free(self, number: int, descriptor: int, forks_before: int) -> None:
        """Gives the memory back at once, though neighbours may still map what is now empty.

        If this process has forked more often than ``forks_before``, its count when the block was made, a child may
        still read the block, and would be killed for that. Then the memory goes when no process maps it any more.

        Runs wherever the last view dies, perhaps in the garbage collector of a thread that holds the lock, so it takes
        none. In a forked child it does nothing, for the memory is the parent's.
        """
        if os.getpid() != self._pid:
            return
        self._descriptors.pop(number, None)
        self._announce(number, -1, 0)
        if forks() == forks_before:
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
    with _spare.opened(f"/proc/{pid}/fd/{descriptor}") as opened:
        if os.fstat(opened).st_size < size:
            text = f"file {descriptor} of process {pid} is no block of {size} bytes here"
            raise OSError(text)
        return np.frombuffer(memoryview(_mapped(opened, size, populate=populate)), np.uint8)


class _Spare:
    """File descriptors that are kept free for what needs one for a moment only, where a process has no more of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[int] = []

    def keep(self) -> None:
        """Keeps some, unless that was done."""
        with self._lock:
            self._refill()

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Opens a file to read and write for a moment; one thread at a time has what was kept."""
        try:
            descriptor = os.open(path, _READ_AND_WRITE)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
        else:
            try:
                yield descriptor
            finally:
                os.close(descriptor)
                self.keep()
            return
        with self._lock:
            descriptor = self._exchanged(path)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
                self._refill()

    def _exchanged(self, path: str) -> int:
        """Opens a file in the place of a kept one; another thread of the script may take that first, so of the next."""
        while self._kept:
            os.close(self._kept.pop())
            with contextlib.suppress(OSError):
                return os.open(path, _READ_AND_WRITE)
        return os.open(path, _READ_AND_WRITE)

    def _refill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._kept) < _SPARE_DESCRIPTORS:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


_READ_AND_WRITE = os.O_RDWR | os.O_CLOEXEC
_SPARE_DESCRIPTORS = 4
_spare = _Spare()


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


def made_private(memory: np.ndarray) -> None:
    """Makes a whole block that is mapped here this process's own, with the contents that it has; for a forked child."""
    contents, address = memory.tobytes(), _address(memory)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    _libc.mmap(address, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    memory[:] = np.frombuffer(contents, np.uint8)


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
