"""From a bucket to data on the move: packing, the collective, unpacking; and the operations that are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from coordd.member import Bucket
from coordd.messages import Kind
from coordd.table import Entry
from coordd.transport import collectives
from coordd.transport.collectives import Group, Pulse, Reduction, Scratch, Steps
from coordd.transport.protocol import Lane

__all__ = ["Flights"]

_PACKED_BYTES = 128 << 10
"""Below this a tensor is copied into the bucket's buffer; above it is reduced where it lies, which is cheaper."""
_ACTIVE = 4
_DONE = object()


class Flights:
    """Operations in flight on one lane, started in the order of the plans, a few at a time."""

    def __init__(
        self, lane: Lane, *, rank: int, size: int, chunk: int, landed: Callable[[Sequence[Entry]], None]
    ) -> None:
        """Starts with none.

        Args:
            lane: where the data travels.
            rank: this rank.
            size: number of ranks.
            chunk: bytes in which large tensors travel.
            landed: called with the entries whose results have arrived, before their handles are resolved.
        """
        self._lane = lane
        self._rank = rank
        self._world = tuple(range(size))
        self._chunk = chunk
        self._landed = landed
        self._queue: deque[Bucket] = deque()
        self._active: list[tuple[Bucket, Steps]] = []
        self._abandoned: list[tuple[Bucket, Steps]] = []
        self._pulse = Pulse()
        self._scratch = Scratch()
        self.bytes_moved = 0

    def __len__(self) -> int:
        return len(self._active) + len(self._queue)

    def start(self, bucket: Bucket) -> None:
        """Puts a bucket in line."""
        self._queue.append(bucket)

    def advance(self) -> bool:
        """Drives what is in flight; says whether something has moved."""
        before = self._pulse.beats
        started = False
        while self._queue and len(self._active) < _ACTIVE:
            bucket = self._queue.popleft()
            self._active.append((bucket, self._steps(bucket)))
            started = True
        landed = [flight for flight in self._active if next(flight[1], _DONE) is _DONE]
        for flight in landed:
            self._active.remove(flight)
        return started or bool(landed) or self._pulse.beats > before

    def clear(self) -> list[Entry]:
        """Abandons everything, and returns what was under way."""
        entries = [entry for bucket, _ in self._active for entry in bucket.entries]
        entries += [entry for bucket in self._queue for entry in bucket.entries]
        self._abandoned += self._active  # their buffers live on, for the network may still write into them
        self._active.clear()
        self._queue.clear()
        return entries

    def _steps(self, bucket: Bucket) -> Steps:
        request = bucket.request
        members = request.members or self._world
        group = Group(
            self._lane,
            members,
            self._rank,
            sequence=bucket.sequence,
            chunk=self._chunk,
            pulse=self._pulse,
            scratch=self._scratch,
        )
        match request.kind:
            case Kind.ALLREDUCE:
                return self._allreduce(group, bucket)
            case Kind.BROADCAST:
                return self._broadcast(group, bucket.entries[0])
            case Kind.ALLGATHER:
                return self._allgather(group, bucket.entries[0], bucket.sizes)
            case Kind.BARRIER:
                return self._barrier(bucket.entries[0])

    def _allreduce(self, group: Group, bucket: Bucket) -> Steps:
        """Reduces what is small in one buffer, and what is large where it lies."""
        request = bucket.request
        flats = [_flat(entry.array) for entry in bucket.entries]
        small = [flat for flat in flats if flat.nbytes < _PACKED_BYTES]
        arrays = flats
        if len(small) > 1:
            buffer = np.concatenate(small)
            arrays = [buffer, *(flat for flat in flats if flat.nbytes >= _PACKED_BYTES)]
        reduction = Reduction(request.op, flats[0].dtype, prescale=request.prescale, postscale=request.postscale)
        yield from collectives.allreduce(group, arrays, reduction)
        if len(small) > 1:
            start = 0
            for flat in small:
                stop = start + flat.size
                flat[...] = buffer[start:stop]
                start = stop
        self._land(bucket.entries, flats)

    def _land(self, entries: Sequence[Entry], flats: Sequence[np.ndarray]) -> None:
        """Completes operations in place, whose values may have travelled in a copy."""
        self._landed(entries)
        for entry, flat in zip(entries, flats, strict=True):
            array = entry.array
            self.bytes_moved += array.nbytes
            if not array.flags.c_contiguous:
                array[...] = flat.reshape(array.shape)
            entry.finish(array)

    def _broadcast(self, group: Group, entry: Entry) -> Steps:
        flat = _flat(entry.array)
        yield from collectives.broadcast(group, flat, group.members.index(entry.request.root))
        self._land([entry], [flat])

    def _allgather(self, group: Group, entry: Entry, sizes: Sequence[int]) -> Steps:
        """Makes an array whose first dimension is the sum of the members'."""
        rows = sum(sizes)
        gathered = np.empty((rows, *entry.array.shape[1:]), entry.array.dtype)
        stops = np.cumsum(sizes)
        blocks = [gathered[stop - size : stop].reshape(-1) for stop, size in zip(stops, sizes, strict=True)]
        blocks[group.me][...] = entry.array.reshape(-1)
        yield from collectives.allgather(group, blocks)
        self.bytes_moved += gathered.nbytes
        self._landed([entry])
        entry.finish(gathered)

    def _barrier(self, entry: Entry) -> Steps:
        """That all members have announced it is all there is to a barrier."""
        self._land([entry], [entry.array])
        return
        yield


def _flat(array: np.ndarray) -> np.ndarray:
    """The array in C order as one dimension: a view if that is possible, else a copy."""
    return np.ascontiguousarray(array).reshape(-1)
