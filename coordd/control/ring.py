"""A one-way queue of byte strings in memory that two processes see: one writes, one reads, and neither ever waits.

The bytes ever written and the bytes ever read are counted, each by one side; they say what is in the ring::

    writer: room?, frame, fence, written       reader: written?, fence, frame, fence, read
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coordd.errors import CoorddError
from coordd.transport.board import Board, fence
from coordd.transport.segments import attach, lasting

__all__ = ["RING_BYTES", "RingError", "RingReader", "RingWriter", "join"]

RING_BYTES = 64 << 10
"""Memory of one ring, counts included."""
_WRITTEN, _READ, _START = 0, 8, 128  # words, each with a cache line of its own; then bytes
_LENGTH = struct.Struct("=I")


class RingError(CoorddError):
    """The ring holds what no writer has put there."""


class RingWriter:
    """The end that fills a ring."""

    def __init__(self, memory: memoryview) -> None:
        """Takes memory of any size whose start is aligned; all zero at first."""
        self._words = memory[:_START].cast("q")
        self._bytes = memory[_START:]
        self._written = 0

    def put(self, data: bytes) -> bool:
        """Adds one string; False if there is no room for it now."""
        frame = _LENGTH.pack(len(data)) + data
        capacity, start = len(self._bytes), self._written
        held = start - self._words[_READ]
        if held < 0 or held + len(frame) > capacity:
            return False
        at = start % capacity
        head = frame[: capacity - at]
        self._bytes[at : at + len(head)] = head
        self._bytes[: len(frame) - len(head)] = frame[len(head) :]
        fence()
        self._written = self._words[_WRITTEN] = start + len(frame)
        return True


class RingReader:
    """The end that empties it."""

    def __init__(self, memory: memoryview) -> None:
        """Takes the same memory."""
        self._words = memory[:_START].cast("q")
        self._bytes = memory[_START:]
        self._read = 0
        self._seen = 0

    @property
    def news(self) -> bool:
        """Whether something was written since `take` has last looked."""
        return self._words[_WRITTEN] != self._seen

    def take(self) -> bytes | None:
        """Removes the oldest string; None if there is none.

        Raises:
            RingError: a count or a length cannot be right.
        """
        self._seen = self._words[_WRITTEN]
        held = self._seen - self._read
        if held == 0:
            return None
        fence()
        (length,) = _LENGTH.unpack(self._part(self._read, _LENGTH.size))
        end = self._read + _LENGTH.size + length
        if held > len(self._bytes) or end > self._seen:
            text = f"a string of {length} bytes among {held} in a ring of {len(self._bytes)}"
            raise RingError(text)
        data = self._part(end - length, length)
        fence()
        self._read = self._words[_READ] = end
        return data

    def _part(self, start: int, length: int) -> bytes:
        at = start % len(self._bytes)
        head = bytes(self._bytes[at : at + length])
        return head if len(head) == length else head + bytes(self._bytes[: length - len(head)])


def join(
    rank: int, others: Sequence[int], boards: Mapping[int, Board], gather: Callable[[Any], list[Any]]
) -> dict[int, tuple[RingWriter, RingReader]] | None:
    """Makes rings from and to other ranks of this host; all ranks of the world call it.

    Args:
        rank: this one.
        others: those that it speaks with, and that name it, too.
        boards: of the ranks of this host.
        gather: exchanges a value with all ranks.

    Returns:
        None if there are ranks anywhere that cannot see their neighbours' rings: all go the same way.
    """
    memory, descriptor = None, -1
    with contextlib.suppress(OSError):
        memory, descriptor = lasting(max(len(others), 1) * RING_BYTES)
    told: list[tuple[int, list[int]]] = gather((descriptor, list(others)))
    rings = {}
    if memory is not None:
        with contextlib.suppress(OSError):
            for other, inward in zip(others, _divided(memory, len(others)), strict=True):
                rings[other] = RingWriter(_outward(boards[other].pid, *told[other], rank)), RingReader(inward)
    joined = all(gather(memory is not None and len(rings) == len(others)))
    if memory is not None:
        os.close(descriptor)  # by now nobody needs it
    return rings if joined else None


def _outward(pid: int, descriptor: int, senders: Sequence[int], rank: int) -> memoryview:
    """Maps this rank's ring in a neighbour's memory.

    Raises:
        OSError: there is none, or it cannot be seen from here.
    """
    if rank not in senders:
        text = f"process {pid} does not listen to rank {rank}"
        raise OSError(text)
    memory = attach(pid, descriptor, len(senders) * RING_BYTES, populate=False)
    return _divided(memory, len(senders))[senders.index(rank)]


def _divided(memory: np.ndarray, count: int) -> list[memoryview]:
    return [memory[start * RING_BYTES : (start + 1) * RING_BYTES].data for start in range(count)]
