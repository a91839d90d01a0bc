"""Shared memory, wake-ups and lanes of simulated ranks: the real ones, but in one process, and without time.

A sleeping rank is woken as in reality: through its board, or by a message that arrives on its lane.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np

from coordd.collectives.dispatch import Plane
from coordd.transport.local import LocalWorld
from coordd.transport.shared_memory.board import ASLEEP, BOARD_WORDS, FIRST_INLINE, FOR_ALL, Board
from coordd.transport.shared_memory.host_memory import Commons
from coordd.transport.shared_memory.segments import Heap

__all__ = ["LEAST_TAGS", "lent", "planes"]

LEAST_TAGS = 1 << 15
"""The smallest number of tags that MPI guarantees."""


class _Board(Board):
    """A board in this process's memory; its wake-up calls ``wake``."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, BOARD_WORDS * 8), np.uint8)  # only touched pages take memory
        self.words = self.memory[:FIRST_INLINE].data.cast("q")
        self.blocks: list[np.ndarray] = []
        self._wake = wake

    def ring(self, what: int = FOR_ALL) -> None:
        """Wakes the owner if it sleeps and waits for such an event."""
        if self.words[ASLEEP] >= what:
            self._wake()

    def close(self) -> None:
        """Does nothing: the memory belongs to the process."""


class _Heap(Heap):
    """Blocks in this process's memory."""

    def __init__(self, blocks: list[np.ndarray]) -> None:
        self._blocks = blocks

    def allocate(self, size: int) -> np.ndarray:
        """Returns a new block, zeroed."""
        self._blocks.append(np.zeros(size, np.uint8))
        return self._blocks[-1][:]

    def locate(self, array: np.ndarray) -> tuple[int, int] | None:
        """Returns the number of the block that contains an array, and the offset in bytes; None if no block does."""
        start = array.__array_interface__["data"][0]
        for number, block in enumerate(self._blocks):
            first = block.__array_interface__["data"][0]
            if first <= start and start + array.nbytes <= first + block.size:
                return number, start - first
        return None


class _Commons(Commons):
    """One rank's view of the shared memory of a simulated host."""

    def __init__(self, ranks: Sequence[int], rank: int, boards: Sequence[_Board]) -> None:
        super().__init__(ranks, rank, boards)
        self._memories = {each: board.blocks for each, board in zip(ranks, boards, strict=True)}
        self.heap = _Heap(self._memories[rank])

    def block(self, rank: int, number: int) -> np.ndarray:
        """Returns a block of another rank of the host."""
        return self._memories[rank][number]


def planes(
    hosts: Sequence[str], *, shared: bool, chunk: int, wake: Sequence[Callable[[], None]]
) -> tuple[list[Plane], LocalWorld]:
    """Creates the data planes of all ranks.

    Args:
        hosts: the host of every rank.
        shared: whether ranks of a host have shared memory; if not, all data takes the lane.
        chunk: bytes per piece of a large tensor.
        wake: for every rank, the function to call for its wake-up, or when a message arrives for it.

    Returns:
        The planes, and the lanes between them.
    """
    world = LocalWorld(len(hosts))
    boards = [_Board(each) for each in wake] if shared else []
    found = []
    for rank, host in enumerate(hosts):
        near = [other for other, name in enumerate(hosts) if name == host]
        commons = _Commons(near, rank, [boards[other] for other in near]) if shared else None
        lane = world.join(rank, wake[rank]).collective
        lane.tags = LEAST_TAGS
        found.append(Plane(lane, commons, rank=rank, hosts=hosts, chunk=chunk))
    return found, world


def lent(plane: Plane) -> int:
    """Returns the number of blocks of shared memory that a rank's operations hold."""
    commons = plane._commons  # noqa: SLF001 - looking inside is what this is for
    if not isinstance(commons, _Commons):
        return 0
    return len(commons._memories[commons.rank]) - sum(map(len, commons._spare.values()))  # noqa: SLF001 - as above
