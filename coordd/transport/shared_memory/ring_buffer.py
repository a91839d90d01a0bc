"""One-way queue of byte strings in memory shared by two processes: one writes, one reads, neither ever waits.

The writer counts the bytes ever written, the reader the bytes ever read; the difference is the content of the ring::

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
from coordd.transport.shared_memory.board import Board, fence
from coordd.transport.shared_memory.segments import attach, lasting

__all__ = ["RING_BYTES", "RingError", "RingReader", "RingWriter", "join"]

RING_BYTES = 64 << 10
"""Bytes of one ring, including its counts."""
_WRITTEN, _READ, _START = 0, 8, 128  # the two counts have a cache line each; the data follows
_LENGTH = struct.Struct("=I")


class RingError(CoorddError):
    """The ring holds bytes that no writer has put there."""


class RingWriter:
    """The writing end of a ring."""

    def __init__(self, memory: memoryview) -> None:
        """Takes memory of any size with an aligned start, initially all zero."""
        self._words = memory[:_START].cast("q")
        self._bytes = memory[_START:]
        self._written = 0

    def put(self, data: bytes) -> bool:
        """Appends one string; returns False if there is no room for it now."""
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
    """The reading end of a ring."""

    def __init__(self, memory: memoryview) -> None:
        """Takes the memory that the writer uses."""
        self._words = memory[:_START].cast("q")
        self._bytes = memory[_START:]
        self._read = 0
        self._seen = 0

    @property
    def news(self) -> bool:
        """Whether the writer has written since the last call of `take`."""
        return self._words[_WRITTEN] != self._seen

    def take(self) -> bytes | None:
        """Removes and returns the oldest string; None if the ring is empty.

        Raises:
            RingError: a count or a length is invalid.
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
    """Creates rings from and to other ranks of this host; all ranks of the world must call it.

    Args:
        rank: this rank.
        others: the ranks that it exchanges messages with; each of them must list this rank, too.
        boards: the boards of the ranks of this host.
        gather: exchanges a value with all ranks.

    Returns:
        The writer and the reader for each of ``others``; None if any rank of the job cannot map its neighbours' rings:
        all ranks make the same choice.
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
        os.close(descriptor)  # all neighbours have mapped the memory by now
    return rings if joined else None


def _outward(pid: int, descriptor: int, senders: Sequence[int], rank: int) -> memoryview:
    """Maps this rank's ring in a neighbour's memory.

    Raises:
        OSError: the neighbour has no ring for this rank, or its memory cannot be mapped.
    """
    if rank not in senders:
        text = f"process {pid} does not listen to rank {rank}"
        raise OSError(text)
    memory = attach(pid, descriptor, len(senders) * RING_BYTES, populate=False)
    return _divided(memory, len(senders))[senders.index(rank)]


def _divided(memory: np.ndarray, count: int) -> list[memoryview]:
    return [memory[start * RING_BYTES : (start + 1) * RING_BYTES].data for start in range(count)]
