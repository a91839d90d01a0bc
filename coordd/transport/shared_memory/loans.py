"""Zero-copy blocks: a neighbour reads a rank's data in the memory where it lies, and then returns the block.

A block begins with one state word: whether a neighbour is using the contents. The owner sets it before it sends a note
about the block; the neighbour clears it when the last view of the contents is freed. So nothing is copied, no rank is
woken up to learn that the block was read, and the same pages are reused.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from coordd.host.fork import close_in_children
from coordd.transport.shared_memory.board import release
from coordd.transport.shared_memory.segments import attach, lasting, made_private

__all__ = ["Loan", "Loans", "blank"]

_ALIGNMENT = 64
_HEAD_BYTES = _ALIGNMENT  # the state word takes eight of them
_FREE, _LENT, _RETIRED = 0, 1, 2
_PAGE_BYTES = 4096
_FINENESS = 3  # sizes are rounded up by an eighth at most, so that a block can be reused for a slightly different size
_MOST_BLOCKS = 256  # each keeps a file descriptor open; the default limit of a process is 1024


class Loan(NamedTuple):
    """How a neighbour finds a block: a number that its owner never reuses, the descriptor, the size in bytes."""

    number: int
    descriptor: int
    size: int


class _Block:
    """A block that this rank owns."""

    def __init__(self, number: int, size: int) -> None:
        self.memory, descriptor = lasting(size)
        self.loan = Loan(number, descriptor, size)
        self.word = self.memory[:8].data.cast("q")
        self.writer: weakref.ref[np.ndarray] | None = None

    @property
    def free(self) -> bool:
        """Whether neither this rank nor another one has a view of it."""
        # The order matters: this rank lends a block before it drops its own view.
        return (self.writer is None or self.writer() is None) and self.word[0] == _FREE


def blank(nbytes: int) -> np.ndarray:
    """Allocates flat process-private memory, aligned to 64 bytes, uninitialised."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


class Loans:
    """One rank's own blocks, and the blocks of its neighbours that it has mapped.

    It has no lock: see `coordd.ops.handles.Handle`. A thread that removes a block from the LRU list has it for itself.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Starts empty; ``pids`` are the process ids of the ranks of this host."""
        self._pids = pids
        self._numbers = itertools.count(1)
        self._own: dict[int, _Block] = {}  # by number
        self._lru: list[_Block] = []  # least recently used first; a block that a thread has claimed is not in it
        self._seen: dict[tuple[int, int], np.ndarray] = {}
        close_in_children(self)

    def blank(self, nbytes: int) -> np.ndarray:
        """Allocates memory like the function `blank`, which can be lent once; callable from any thread.

        If no more shared memory is available, the memory is process-private, and is sent like any other array.
        """
        if not self._pids:
            return blank(nbytes)
        block = self._found(nbytes + _HEAD_BYTES)
        if block is None:
            return blank(nbytes)
        try:
            array = _contents(block.memory, nbytes)
            block.writer = weakref.ref(array)
        finally:
            self._lru.append(block)
        return array

    def lend(self, array: np.ndarray) -> Loan | None:
        """Lends an array that `blank` returned; this rank must not touch it any more. For the daemon's thread.

        Returns None for any other array.
        """
        for block in list(self._own.values()):
            if block.writer is not None and block.writer() is array and block.word[0] == _FREE:
                release()
                block.word[0] = _LENT
                return block.loan
        return None

    def take(self, rank: int, loan: Loan, nbytes: int) -> np.ndarray:
        """Returns the contents of a block that a neighbour has lent; freeing the last view of them returns the block.

        Raises:
            OSError: the neighbour's memory cannot be mapped.
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
        """Bytes of this rank's own blocks."""
        return sum([block.loan.size for block in list(self._own.values())])

    def close(self) -> None:
        """Closes this process's descriptors; existing views of a block stay valid."""
        self._lru.clear()
        while self._own:
            os.close(self._own.popitem()[1].loan.descriptor)
        self._seen.clear()

    def close_in_child(self) -> None:
        """Makes the blocks that a forked child may still read or write private to it, as all other memory is."""
        own = list(self._own.values())
        mine = [block.memory for block in own if block.writer is not None and block.writer() is not None]
        taken = [memory for memory in self._seen.values() if memory[:8].view(np.int64)[0] == _LENT]
        for memory in (*mine, *taken):
            made_private(memory)

    def _found(self, size: int) -> _Block | None:
        """Returns a free block that is large enough, at most about twice as large, or a new one; else None.

        No other thread can claim it until the caller appends it to the LRU list.
        """
        most = 2 * max(size, _PAGE_BYTES)
        fit = [block for block in list(self._lru) if size <= block.loan.size <= most and block.free]
        for block in sorted(fit, key=lambda block: block.loan.size):
            if self._claim(block):
                return block
        step = max(_PAGE_BYTES, 1 << max(size.bit_length() - 1 - _FINENESS, 0))
        self._retire(rounded := -(-size // step) * step)
        if len(self._own) >= _MOST_BLOCKS:
            return None
        try:
            block = _Block(next(self._numbers), rounded)
        except OSError:
            return None
        self._own[block.loan.number] = block
        return block

    def _claim(self, block: _Block) -> bool:
        """Removes a free block from the LRU list; returns False if another thread was faster."""
        try:
            self._lru.remove(block)
        except ValueError:
            return False
        if block.free:
            return True
        self._lru.append(block)  # the other thread had put it back before
        return False

    def _retire(self, coming: int) -> None:
        """Frees the least recently used idle blocks.

        Otherwise idle blocks, of sizes that are not needed again, would outgrow the rest.
        """
        idle = [block for block in list(self._lru) if block.free]
        excess = 2 * sum([block.loan.size for block in idle]) - self.size - coming
        for block in idle:
            if excess <= 0 and len(self._own) < _MOST_BLOCKS:
                break
            if self._claim(block):
                excess -= block.loan.size
                block.word[0] = _RETIRED
                if self._own.pop(block.loan.number, None) is not None:  # else it is closed
                    os.close(block.loan.descriptor)


def _contents(memory: np.ndarray, nbytes: int) -> np.ndarray:
    """Returns a view of a block's contents.

    Views of the returned array keep only that array alive, so it is finalized last.
    """
    return np.frombuffer(memory[_HEAD_BYTES : _HEAD_BYTES + nbytes].data, np.uint8)


def _give_back(word: Any, pid: int) -> None:
    """Clears the state word when the last view is freed. A forked child has nothing to return.

    It does not call `fence`, which takes a lock: the thread that holds that lock may be running the garbage collector.
    """
    if os.getpid() == pid:
        release()  # all reads here happen before the owner's next writes
        word[0] = _FREE
