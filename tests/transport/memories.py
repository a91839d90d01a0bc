"""One rank's memory in an operation of a host, spoilt as soon as its own part has ended: nobody may need it then."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from coordd.collectives.direct import Terms
from coordd.collectives.ring import Pulse
from coordd.transport.shared_memory.host_memory import Commons, Meeting

__all__ = ["Rank", "dice", "entered"]

Arrays = list[np.ndarray]
Steps = Generator[None, None, Any]


class Rank:
    """One rank's side of one operation: its arrays, some of them in common memory, and the memory that it borrows."""

    def __init__(self, commons: Commons, inputs: Arrays, resident: Callable[[], bool]) -> None:
        self.commons = commons
        self.lent: Arrays = []
        self.arrays = [self._somewhere(array, resident=resident()) for array in inputs]
        self.found: Arrays = []

    def _somewhere(self, array: np.ndarray, *, resident: bool) -> np.ndarray:
        """A copy, maybe in common memory, maybe behind something else there."""
        offset = 3 * array.itemsize
        if not resident:
            return array.copy()
        place = self.commons.heap.allocate(offset + array.nbytes + 1)[offset : offset + array.nbytes].view(array.dtype)
        place[...] = array
        return place

    def lend(self, size: int) -> np.ndarray:
        self.lent.append(self.commons.borrow(size))
        self.lent[-1][:] = 0x5A
        return self.lent[-1]

    def terms(self, chunk: int, *, owners: int = 0, between: Callable[[Arrays], Steps] | None = None) -> Terms:
        return Terms(chunk, Pulse(), self.lend, between, owners)

    def end(self) -> None:
        """Takes the results, and spoils what others might still look at."""
        self.found = [array.copy() for array in self.arrays]
        for array in (*self.arrays, *self.lent):
            array.view(np.uint8)[...] = 0xA5

    @property
    def untouched(self) -> bool:
        """Whether nobody has written to this rank's memory after its end."""
        return all((array.view(np.uint8) == 0xA5).all() for array in (*self.arrays, *self.lent))


def entered(meeting: Meeting, steps: Steps | None) -> Steps:
    """Takes part; without steps by saying that this rank will not."""
    while not meeting.enter(word=steps is not None):
        yield
    if steps is None:
        meeting.finish()
        return False
    return (yield from steps)


def dice(seed: int, share: float) -> Callable[[], bool]:
    source = random.Random(seed)
    return lambda: source.random() < share
