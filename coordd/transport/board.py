"""What neighbours tell each other through memory: a board of words for each rank, written by it and read by all.

Words are 64-bit, aligned, and have one writer. Who has written one that others wait for rings the bells of those who
sleep::

    writer: data, fence, word, fence, is anybody asleep?   sleeper: asleep, fence, is there a new word?, sleep
                                                            reader: word, fence, data

One of the two sees the other, so no ring is lost. The reader's fence is none on x86, which does not reorder reads.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple

from coordd.transport.segments import attach, nameless

__all__ = ["BLOCKS", "INLINE_BYTES", "LEGS", "ORDERED", "SLOTS", "Board", "Card", "fence", "release", "ring_all"]

SLOTS = 512
"""Operations that can have a place of their own at once."""
BLOCKS = 2048
"""Blocks of memory that a rank can tell its neighbours of at a time."""
INLINE_BYTES = 32 << 10
"""Bytes of small operations that travel in the slot itself."""
LEGS = 16
"""Arrays of one operation that may lie in common memory each in its own place; one place more is for a ring."""
_FOR_MESSAGES, FOR_ALL = 1, 2
_SLOT_WORDS = 64
_NUMBER_SHIFT = 31
_TOKEN, ASLEEP, _DIRECTORY = 0, 8, 16
_FIRST_SLOT = _DIRECTORY + 2 * BLOCKS
FIRST_INLINE = (_FIRST_SLOT + SLOTS * _SLOT_WORDS) * 8
BOARD_WORDS = FIRST_INLINE // 8 + SLOTS * INLINE_BYTES // 8


class Card(NamedTuple):
    """How a rank's memory and bell are found by its neighbours; ``token`` proves that it is really that process."""

    pid: int
    descriptor: int
    bell: int
    token: int


class Board:
    """One rank's words, in its own process or mapped into a neighbour's."""

    def __init__(self, descriptor: int, pid: int, bell: int) -> None:
        """Maps a board.

        Args:
            descriptor: of the memory, in the owner's process.
            pid: the owner.
            bell: what to write to, so that the owner wakes; in the owner's process.

        Raises:
            OSError: the owner cannot be seen from here.
        """
        self.memory = attach(pid, descriptor, BOARD_WORDS * 8, populate=False)
        self.words = self.memory[:FIRST_INLINE].data.cast("q")
        self.pid = pid
        # For reading, too: then there always is a reader, and no write to a rank that has gone ends this process.
        self._bell = os.open(f"/proc/{pid}/fd/{bell}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    @classmethod
    def create(cls, bell: int) -> tuple[Board, Card]:
        """Makes this rank's board, and the card by which neighbours find it.

        Raises:
            OSError: there is no such memory here, or no ``/proc``.
        """
        descriptor = nameless(BOARD_WORDS * 8)
        try:
            board = cls(descriptor, os.getpid(), bell)
        except OSError:
            os.close(descriptor)
            raise
        board.words[_TOKEN] = secrets.randbits(62)
        for number in range(BLOCKS):
            board.words[_DIRECTORY + 2 * number] = -1
        board._keep = descriptor  # neighbours open it by this number
        return board, Card(os.getpid(), descriptor, bell, board.words[_TOKEN])

    _keep = -1

    @classmethod
    def of(cls, card: Card) -> Board:
        """Maps a neighbour's board.

        Raises:
            OSError: it cannot be seen from here, or another process has that number here.
        """
        board = cls(card.descriptor, card.pid, card.bell)
        if board.words[_TOKEN] != card.token:
            board.close()
            text = f"process {card.pid} is another one here"
            raise OSError(text)
        return board

    def close(self) -> None:
        """Takes this process's hold off."""
        os.close(self._bell)
        if self._keep >= 0:
            os.close(self._keep)

    def list_block(self, number: int, descriptor: int, size: int) -> None:
        """Writes where a block of memory is; for its owner."""
        at = _DIRECTORY + 2 * (number % BLOCKS)
        self.words[at + 1] = size
        release()
        self.words[at] = number << _NUMBER_SHIFT | descriptor if descriptor >= 0 else -1

    def block(self, number: int) -> tuple[int, int]:
        """Returns the descriptor and size of a block; the descriptor is -1 if there is none of that number."""
        at = _DIRECTORY + 2 * (number % BLOCKS)
        found, size = self.words[at], self.words[at + 1]
        return (found & ~(-1 << _NUMBER_SHIFT), size) if found >> _NUMBER_SHIFT == number else (-1, 0)

    def slot(self, number: int) -> int:
        """The index of a slot's first word."""
        return _FIRST_SLOT + number * _SLOT_WORDS

    def has_reached(self, slot: int, stamp: int) -> bool:
        """Whether the owner has begun the operation with this stamp, or a later one in the same slot."""
        return self.words[self.slot(slot)] >= stamp

    def inline(self, number: int) -> memoryview:
        """A slot's own bytes."""
        start = FIRST_INLINE + number * INLINE_BYTES
        return self.memory.data[start : start + INLINE_BYTES]

    def fall_asleep(self, *, data: bool = True) -> None:
        """Says that a ring is needed, for messages only or for data, too; to be followed by a last look."""
        self.words[ASLEEP] = FOR_ALL if data else _FOR_MESSAGES
        fence()

    def wake_up(self) -> None:
        """Says that no ring is needed."""
        self.words[ASLEEP] = 0

    def call(self) -> None:
        """Wakes the owner if it sleeps: there is a message for it."""
        fence()
        self.ring(_FOR_MESSAGES)

    def ring(self, what: int = FOR_ALL) -> None:
        """Wakes the owner if it sleeps and is to be woken for that."""
        if self.words[ASLEEP] >= what:
            with contextlib.suppress(OSError):  # full: it has been rung; broken: it is gone
                os.write(self._bell, b"!")


def ring_all(boards: Sequence[Board]) -> None:
    """Wakes those that sleep; what was written before is seen by those that are about to."""
    fence()
    for board in boards:
        board.ring()


ORDERED = platform.machine().lower() in {"x86_64", "amd64"}
"""Whether this processor keeps writes in order, and reads: then only a write before a read needs a `fence`."""
_lock = threading.Lock()


def fence() -> None:
    """Makes what was written and read before precede what is written or read after, as other processes see it.

    Taking and releasing a lock does so: an atomic instruction on x86; on ARM what comes before the first release stays
    before the second acquisition.
    """
    with _lock:
        pass
    if not ORDERED:
        with _lock:
            pass


def release() -> None:
    """Makes what was read and written before precede the next write.

    Finalizers use it, which run in any thread, even in the middle of `fence`: so it takes no lock that others have.
    """
    if not ORDERED:
        own = threading.Lock()
        for _ in range(2):
            with own:
                pass
