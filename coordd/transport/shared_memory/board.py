"""Shared-memory boards: one board of words for each rank, written by this rank and read by all ranks of the host.

Words are 64-bit, aligned, and have one writer. A rank that writes a word that others wait for wakes the sleeping ones::

    writer: data, fence, word, fence, is a reader asleep?   sleeper: asleep, fence, is there a new word?, sleep
                                                            reader: word, fence, data

At least one of the two sees the other's write, so no wake-up is lost. The reader's fence is a no-op on x86, which does
not reorder reads.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple

from coordd.transport.shared_memory.segments import attach, nameless

__all__ = ["BLOCKS", "INLINE_BYTES", "LEGS", "ORDERED", "SLOTS", "Board", "Card", "fence", "release", "ring_all"]

SLOTS = 512
"""Number of operations that can have a slot of their own at once."""
BLOCKS = 2048
"""Number of memory blocks that a rank can list for its neighbours at a time."""
INLINE_BYTES = 32 << 10
"""Bytes of a slot for the data of small operations."""
LEGS = 16
"""Arrays of one operation that may each lie in shared memory at a place of their own; one more place is for a ring."""
_FOR_MESSAGES, FOR_ALL = 1, 2
_SLOT_WORDS = 64
_NUMBER_SHIFT = 31
_TOKEN, ASLEEP, _DIRECTORY = 0, 8, 16
_FIRST_SLOT = _DIRECTORY + 2 * BLOCKS
FIRST_INLINE = (_FIRST_SLOT + SLOTS * _SLOT_WORDS) * 8
BOARD_WORDS = FIRST_INLINE // 8 + SLOTS * INLINE_BYTES // 8


class Card(NamedTuple):
    """How neighbours find a rank's memory and wake-up descriptor; ``token`` proves that it is really that process."""

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
            pid: process id of the owner.
            bell: the owner's wake-up descriptor, in the owner's process; a write to it wakes the owner.

        Raises:
            OSError: the owner's memory cannot be mapped from this process.
        """
        self.memory = attach(pid, descriptor, BOARD_WORDS * 8, populate=False)
        self.words = self.memory[:FIRST_INLINE].data.cast("q")
        self.pid = pid
        # Opened for reading, too: with a reader always present, a write to a dead rank does not end this process
        # (SIGPIPE).
        self._bell = os.open(f"/proc/{pid}/fd/{bell}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    @classmethod
    def create(cls, bell: int) -> tuple[Board, Card]:
        """Creates this rank's board, and the card with which neighbours find it.

        Raises:
            OSError: the system has no such memory, or no ``/proc``.
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
            OSError: it cannot be mapped from here, or this process id belongs to another process here.
        """
        board = cls(card.descriptor, card.pid, card.bell)
        if board.words[_TOKEN] != card.token:
            board.close()
            text = f"process {card.pid} is another one here"
            raise OSError(text)
        return board

    def close(self) -> None:
        """Closes this process's descriptors of the board."""
        os.close(self._bell)
        if self._keep >= 0:
            os.close(self._keep)

    def list_block(self, number: int, descriptor: int, size: int) -> None:
        """Publishes the descriptor and the size of a block of memory; called by the board's owner."""
        at = _DIRECTORY + 2 * (number % BLOCKS)
        self.words[at + 1] = size
        release()
        self.words[at] = number << _NUMBER_SHIFT | descriptor if descriptor >= 0 else -1

    def block(self, number: int) -> tuple[int, int]:
        """Returns the descriptor and size of a block; descriptor -1 and size 0 if no block has that number."""
        at = _DIRECTORY + 2 * (number % BLOCKS)
        found, size = self.words[at], self.words[at + 1]
        return (found & ~(-1 << _NUMBER_SHIFT), size) if found >> _NUMBER_SHIFT == number else (-1, 0)

    def slot(self, number: int) -> int:
        """Returns the index of a slot's first word."""
        return _FIRST_SLOT + number * _SLOT_WORDS

    def has_reached(self, slot: int, stamp: int) -> bool:
        """Returns whether the owner has begun the operation with this stamp, or a later one in the same slot."""
        return self.words[self.slot(slot)] >= stamp

    def inline(self, number: int) -> memoryview:
        """Returns a slot's own bytes."""
        start = FIRST_INLINE + number * INLINE_BYTES
        return self.memory.data[start : start + INLINE_BYTES]

    def fall_asleep(self, *, data: bool = True) -> None:
        """Announces that this rank sleeps and needs wake-ups, for messages only or for data, too.

        The caller must check once more for new words or messages before it sleeps.
        """
        self.words[ASLEEP] = FOR_ALL if data else _FOR_MESSAGES
        fence()

    def wake_up(self) -> None:
        """Announces that this rank is awake and needs no wake-ups."""
        self.words[ASLEEP] = 0

    def call(self) -> None:
        """Wakes the owner if it sleeps, because there is a message for it."""
        fence()
        self.ring(_FOR_MESSAGES)

    def ring(self, what: int = FOR_ALL) -> None:
        """Wakes the owner if it sleeps and requested wake-ups of this kind."""
        if self.words[ASLEEP] >= what:
            with contextlib.suppress(OSError):  # full pipe: it was woken already; broken pipe: it is gone
                os.write(self._bell, b"!")


def ring_all(boards: Sequence[Board]) -> None:
    """Wakes the owners that sleep; an owner about to sleep sees all words written before."""
    fence()
    for board in boards:
        board.ring()


ORDERED = platform.machine().lower() in {"x86_64", "amd64"}
"""Whether this processor keeps the order of writes and of reads.

Then only a write followed by a read needs a `fence`.
"""
_lock = threading.Lock()


def fence() -> None:
    """Orders all earlier writes and reads before all later ones, as other processes see them.

    Taking and releasing a lock does this: on x86 it is an atomic instruction; on ARM, accesses before the first release
    stay before the second acquisition.
    """
    with _lock:
        pass
    if not ORDERED:
        with _lock:
            pass


def release() -> None:
    """Orders all earlier reads and writes before the next write.

    Finalizers call this in any thread, even in the middle of `fence`, so it takes no shared lock.
    """
    if not ORDERED:
        own = threading.Lock()
        for _ in range(2):
            with own:
                pass
