"""Shared memory of the ranks of one host: blocks of one rank, mapped by its neighbours.

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
from collections.abc import Callable, Iterator

import numpy as np

from coordd.host.fork import close_in_children, forks

__all__ = ["RESERVE_BYTES", "Heap", "attach", "lasting", "made_private", "nameless"]

log = logging.getLogger("coordd")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_PAGE_BYTES = 4096
_MAP_FIXED = 0x10  # value on Linux; Python does not export it
RESERVE_BYTES = (1 << 30) + _PAGE_BYTES
"""Address space of the reserve.

Pages are allocated when they are used, so it is never mapped with all pages present.
"""

_Place = tuple[int, int, int]
"""A block's address, its bytes, its number."""


class Heap:
    """One rank's blocks, by number; numbers are not reused.

    All methods may be called from any thread, unless they say so. It has no lock: see `coordd.ops.handles.Handle`.
    Single operations of dictionaries are atomic.
    """

    def __init__(self, *, announce: Callable[[int, int, int], None], room: int) -> None:
        """Starts empty.

        Args:
            announce: publishes a block to the neighbours: number, file descriptor, bytes; descriptor -1 withdraws it.
            room: capacity of the neighbours' lists; the numbers of two live blocks never differ by a multiple of it.
        """
        self._announce = announce
        self._room = room
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._taken: dict[int, int] = {}  # place in the neighbours' lists -> number
        self._placed: dict[int, _Place] = {}  # by number
        self._sorted: tuple[object, list[_Place]] = (None, [])  # by address, and the version of the blocks
        self._version = object()  # a new one after each change of the blocks
        self._descriptors: dict[int, int] = {}  # by number
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
        """Creates the reserve for `from_reserve` while file descriptors are available.

        It must be called before any other allocation.
        """
        with contextlib.suppress(OSError):  # the address space may be limited (ulimit -v)
            self._reserve = self._allocate(RESERVE_BYTES, populate=False)

    def tell(self, error: OSError) -> None:
        """Warns, once, that there is no more shared memory."""
        if not self._told:
            self._told = True
            text = "this rank gets no more common memory, and does with what it has, more slowly: %s; try ulimit -n"
            log.warning(text, error)

    def from_reserve(self, size: int) -> np.ndarray:
        """Returns memory, all zero, that needs no new file descriptor and cannot be freed.

        Call it from one thread only.

        Raises:
            OSError: the reserve is used up.
        """
        start, self._reserved = self._reserved, self._reserved + -(-size // _PAGE_BYTES) * _PAGE_BYTES
        if self._reserve is None or self._reserved > self._reserve.size:
            self._reserved = start
            text = f"this rank cannot get {size} bytes of common memory: raise the limit on open files (ulimit -n)"
            raise OSError(errno.EMFILE, text)
        return self._reserve[start : start + size]

    def close_in_child(self) -> None:
        """Makes a forked child's writes to these blocks change its own copy only, as with all other memory.

        Pages that the child has not written may still show later writes of its parent.
        """
        for address, size, number in list(self._placed.values()):
            if (descriptor := self._descriptors.get(number)) is not None:
                flags = mmap.MAP_PRIVATE | _MAP_FIXED
                _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)

    def close(self) -> None:
        """Drops the reserve once no part of it is in use any more; other blocks are freed with their last views."""
        self._reserve = None

    @property
    def size(self) -> int:
        """Bytes in use; only the used part of the reserve counts."""
        reserve = 0 if self._reserve is None else self._reserve.size - self._reserved
        return sum([size for _, size, _ in list(self._placed.values())]) - reserve

    def locate(self, array: np.ndarray) -> tuple[int, int] | None:
        """Returns the block in which a contiguous array lies, and the offset in bytes; None if it lies elsewhere."""
        if not self._placed:
            return None
        start = _address(array)
        places = self._by_address()
        found = bisect.bisect(places, (start, 1 << 62, 0)) - 1
        if found < 0:
            return None
        address, size, number = places[found]
        return (number, start - address) if start + array.nbytes <= address + size else None

    def _by_address(self) -> list[_Place]:
        """Returns all blocks, sorted by address."""
        version = self._version  # read first: a change meanwhile makes what follows out of date
        known, places = self._sorted
        if known is not version:
            places = sorted(self._placed.values())
            self._sorted = version, places
        return places

    def _enter(self, address: int, size: int) -> int:
        """Records where a block lies; returns its number."""
        while True:
            if len(self._taken) >= self._room:
                text = f"{self._room} blocks of common memory are in use already"
                raise OSError(text)
            number = next(self._numbers)
            if self._taken.setdefault(number % self._room, number) == number:
                break
        self._placed[number] = address, size, number
        self._version = object()
        return number

    def _free(self, number: int, descriptor: int, forks_before: int) -> None:
        """Frees the memory at once, even if neighbours still map the block, which is then empty.

        If this process has forked since the block was created (``forks_before`` is the fork count at that time), a
        child may still read the block and would be killed by that. Then the memory is freed when no process maps it any
        more.

        Runs where the last view is freed, in any thread. In a forked child it does nothing, because the memory is the
        parent's.
        """
        if os.getpid() != self._pid:
            return
        self._placed.pop(number, None)  # before its addresses are used again
        self._version = object()
        self._descriptors.pop(number, None)
        self._announce(number, -1, 0)
        if forks() == forks_before:
            os.ftruncate(descriptor, 0)
        os.close(descriptor)
        self._taken.pop(number % self._room, None)  # last: a block that takes the place must not be withdrawn


def attach(pid: int, descriptor: int, size: int, *, populate: bool = True) -> np.ndarray:
    """Maps a block of a process on this host; ``populate`` maps all of its pages now.

    Raises:
        OSError: the process is gone, cannot be seen from here, belongs to another user, or its id is another process
            here.
    """
    with _spare.opened(f"/proc/{pid}/fd/{descriptor}") as opened:
        if os.fstat(opened).st_size < size:
            text = f"file {descriptor} of process {pid} is no block of {size} bytes here"
            raise OSError(text)
        return np.frombuffer(memoryview(_mapped(opened, size, populate=populate)), np.uint8)


class _Spare:
    """File descriptors kept in reserve for short uses when the process has no free descriptor left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[int] = []

    def keep(self) -> None:
        """Fills the reserve of descriptors."""
        with self._lock:
            self._refill()

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Opens a file for reading and writing for a moment; only one thread at a time may use the reserve."""
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
        """Opens a file in place of a kept descriptor.

        It retries, because another thread may take the freed descriptor first.
        """
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
    """Creates memory, all zero, without a name in any file system, and returns its descriptor.

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
    """Creates memory, all zero, that exists as long as any process maps it.

    Returns it with its descriptor for `attach`.

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
    """Replaces a mapped block by private memory of this process with the same contents; for a forked child."""
    contents, address = memory.tobytes(), _address(memory)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    _libc.mmap(address, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    memory[:] = np.frombuffer(contents, np.uint8)


def _mapped(descriptor: int, size: int, *, populate: bool = True) -> ctypes.Array[ctypes.c_uint8]:
    """Maps memory, by default with all pages present, because a page fault costs as much as copying the page.

    Does not use Python's own ``mmap``, which keeps a file descriptor for each mapping: many ranks per host would run
    out.
    """
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False  # runs after finalizers registered later
    return memory


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
