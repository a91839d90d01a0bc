"""Memory that changes hands: what a rank has written there, a neighbour reads where it lies, and gives back.

A block begins with one word: whether a neighbour has what follows. The owner sets it before it tells of the block; the
neighbour clears it with the last view of the contents. So nothing is copied, nobody is woken to say that it was read,
and the same pages are used again and again.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from coordd.forks import close_in_children
from coordd.transport.board import release
from coordd.transport.segments import attach, lasting, made_private

__all__ = ["Loan", "Loans", "blank"]

_ALIGNMENT = 64
_HEAD_BYTES = _ALIGNMENT  # of which the word takes eight
_FREE, _LENT, _RETIRED = 0, 1, 2
_PAGE_BYTES = 4096
_FINENESS = 3  # blocks are rounded up by an eighth at most, so that one is fit for what is nearly as large
_MOST_BLOCKS = 256  # each keeps a file open, of which a process may have 1024 by default


class Loan(NamedTuple):
    """How a neighbour finds a block: its number, which no other of this owner ever has, where it is, and its bytes."""

    number: int
    descriptor: int
    size: int


class _Block:
    """A block of one's own."""

    def __init__(self, number: int, size: int) -> None:
        self.memory, descriptor = lasting(size)
        self.loan = Loan(number, descriptor, size)
        self.word = self.memory[:8].data.cast("q")
        self.writer: weakref.ref[np.ndarray] | None = None

    @property
    def free(self) -> bool:
        """Whether neither this rank nor another one has a view of it."""
        return self.word[0] == _FREE and (self.writer is None or self.writer() is None)


def blank(nbytes: int) -> np.ndarray:
    """Allocates flat memory of this process, at a multiple of 64, with anything in it."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


class Loans:
    """One rank's blocks, and those of its neighbours that it has seen."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Starts empty; ``pids`` are the processes of the ranks of this host."""
        self._pids = pids
        self._lock = threading.Lock()
        self._made = 0
        self._own: list[_Block] = []  # the one used last is the last
        self._seen: dict[tuple[int, int], np.ndarray] = {}
        close_in_children(self)

    def blank(self, nbytes: int) -> np.ndarray:
        """Allocates memory like that, which can be lent once; for any thread.

        Where no more can be had in common, it is this process's own, and travels as any other array does.
        """
        if not self._pids:
            return blank(nbytes)
        with self._lock:
            block = self._found(nbytes + _HEAD_BYTES)
            if block is None:
                return blank(nbytes)
            array = _contents(block.memory, nbytes)
            block.writer = weakref.ref(array)
            self._own.remove(block)
            self._own.append(block)
            return array

    def lend(self, array: np.ndarray) -> Loan | None:
        """Hands over what `blank` has returned, which this rank must not touch any more; None for any other array."""
        with self._lock:
            for block in self._own:
                if block.writer is not None and block.writer() is array and block.word[0] == _FREE:
                    release()
                    block.word[0] = _LENT
                    return block.loan
        return None

    def take(self, rank: int, loan: Loan, nbytes: int) -> np.ndarray:
        """Returns what a neighbour has lent; given back with the last view of it.

        Raises:
            OSError: the neighbour's memory cannot be seen.
        """
        memory = self._seen.get((rank, loan.number))
        if memory is None:
            self._seen = {key: block for key, block in self._seen.items() if block[:8].view(np.int64)[0] != _RETIRED}
            memory = self._seen[rank, loan.number] = attach(self._pids[rank], loan.descriptor, loan.size)
        array = _contents(memory, nbytes)
        weakref.finalize(array, _give_back, memory[:8].data.cast("q"), os.getpid()).atexit = False
        return array

    @property
    def size(self) -> int:
        """Bytes of one's own blocks."""
        return sum([block.loan.size for block in self._own])

    def close(self) -> None:
        """Takes this process's hold off; who has a view of a block keeps it."""
        with self._lock:
            for block in self._own:
                os.close(block.loan.descriptor)
            self._own.clear()
        self._seen.clear()

    def close_in_child(self) -> None:
        """Has what a forked child reads and writes where messages lie be its own, as all other memory is."""
        mine = [block.memory for block in self._own if block.writer is not None and block.writer() is not None]
        taken = [memory for memory in self._seen.values() if memory[:8].view(np.int64)[0] == _LENT]
        for memory in (*mine, *taken):
            made_private(memory)

    def _found(self, size: int) -> _Block | None:
        """Finds a free block that is large enough, and not twice as large as that; or makes one."""
        fit = [block for block in self._own if size <= block.loan.size <= 2 * max(size, _PAGE_BYTES) and block.free]
        if fit:
            return min(fit, key=lambda block: block.loan.size)
        step = max(_PAGE_BYTES, 1 << max(size.bit_length() - 1 - _FINENESS, 0))
        self._retire(rounded := -(-size // step) * step)
        if len(self._own) == _MOST_BLOCKS:
            return None
        self._made += 1
        try:
            self._own.append(_Block(self._made, rounded))
        except OSError:
            return None
        return self._own[-1]

    def _retire(self, coming: int) -> None:
        """Frees what has lain idle for longest, lest idle blocks, of sizes that do not come again, outgrow the rest."""
        idle = [block for block in self._own if block.free]
        excess = 2 * sum([block.loan.size for block in idle]) - self.size - coming
        for block in idle:
            if excess <= 0 and len(self._own) < _MOST_BLOCKS:
                break
            excess -= block.loan.size
            block.word[0] = _RETIRED
            os.close(block.loan.descriptor)
            self._own.remove(block)


def _contents(memory: np.ndarray, nbytes: int) -> np.ndarray:
    """Views a block's contents; views of what is returned keep just that alive, and so its end is theirs."""
    return np.frombuffer(memory[_HEAD_BYTES : _HEAD_BYTES + nbytes].data, np.uint8)


def _give_back(word: Any, pid: int) -> None:
    """Clears the word: the last thing that happens here. A forked child has nothing to give back.

    There is no `fence`, for that takes a lock, and whoever holds it may be collecting garbage just now.
    """
    if os.getpid() == pid:
        release()  # what was read here was read before the owner writes something else
        word[0] = _FREE
