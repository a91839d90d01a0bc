"""From a bucket to data on the move: packing, the collective, unpacking; and the operations that are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from coordd.member import Bucket
from coordd.messages import Kind, ReduceOp, Request
from coordd.routes import Route, route
from coordd.table import Entry
from coordd.transport import collectives, shared
from coordd.transport.collectives import Group, Pulse, Reduction, Scratch, Steps
from coordd.transport.commons import Commons, Meeting
from coordd.transport.protocol import Lane

__all__ = ["Flights"]

_PACKED_BYTES = 128 << 10
"""Below this a tensor is copied into the bucket's buffer; above it is reduced where it lies, which is cheaper."""
_ACTIVE = 4
_SLOTS = 64
_DONE = object()


class Flights:
    """Operations in flight, started in the order of the plans, a few at a time."""

    def __init__(
        self,
        lane: Lane,
        *,
        rank: int,
        hosts: Sequence[str],
        commons: Commons | None,
        chunk: int,
        landed: Callable[[Sequence[Entry]], None],
    ) -> None:
        """Starts with none.

        Args:
            lane: where data travels between hosts.
            rank: this rank.
            hosts: the host of every rank.
            commons: where data travels on this host; None if it takes the lane there, too.
            chunk: bytes in which large tensors travel.
            landed: called with the entries whose results have arrived, before their handles are resolved.
        """
        self._lane = lane
        self._rank = rank
        self._hosts = hosts
        self._world = tuple(range(len(hosts)))
        self._commons = commons
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

    @property
    def heralded(self) -> bool:
        """Whether everything in flight rings the bell when it can go on."""
        return self._commons is not None and len(self._commons.ranks) == len(self._world)

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

    def nod_off(self) -> bool:
        """Asks neighbours to ring from now on, and looks a last time; True if something has moved meanwhile."""
        if self._commons is None or not self._active:
            return False
        self._commons.mine.fall_asleep()
        moved = self.advance()
        if moved:
            self._commons.mine.wake_up()
        return moved

    def wake_up(self) -> None:
        """Tells neighbours not to ring any more."""
        if self._commons is not None:
            self._commons.mine.wake_up()

    def clear(self) -> list[Entry]:
        """Abandons everything, and returns what was under way."""
        entries = [entry for bucket, _ in self._active for entry in bucket.entries]
        entries += [entry for bucket in self._queue for entry in bucket.entries]
        self._abandoned += self._active  # their buffers live on, for the network may still write into them
        self._active.clear()
        self._queue.clear()
        return entries

    def _steps(self, bucket: Bucket) -> Steps:
        match bucket.request.kind:
            case Kind.ALLREDUCE:
                return self._allreduce(bucket)
            case Kind.BROADCAST:
                return self._broadcast(bucket)
            case Kind.ALLGATHER:
                return self._allgather(bucket)
            case Kind.BARRIER:
                return self._barrier(bucket.entries[0])

    def _group(self, bucket: Bucket, members: Sequence[int]) -> Group:
        """The members as they are reached over the lane."""
        return Group(
            self._lane,
            members,
            self._rank,
            sequence=bucket.sequence,
            chunk=self._chunk,
            pulse=self._pulse,
            scratch=self._scratch,
        )

    def _meeting(self, bucket: Bucket, members: Sequence[int]) -> Meeting | None:
        """The members as they are reached in common memory; None if they are not."""
        if self._commons is None or len(members) == 1 or any(rank not in self._commons.boards for rank in members):
            return None
        return self._commons.meeting(bucket.sequence % _SLOTS, bucket.sequence, members)

    def _allreduce(self, bucket: Bucket) -> Steps:
        """Reduces what is small in one buffer, and what is large where it lies."""
        flats = [_flat(entry.array) for entry in bucket.entries]
        small = [flat for flat in flats if flat.nbytes < _PACKED_BYTES]
        arrays = flats
        if len(small) > 1:
            buffer = np.concatenate(small)
            arrays = [buffer, *(flat for flat in flats if flat.nbytes >= _PACKED_BYTES)]
        yield from self._reduce(bucket, arrays)
        if len(small) > 1:
            start = 0
            for flat in small:
                stop = start + flat.size
                flat[...] = buffer[start:stop]
                start = stop
        self._land(bucket.entries, flats)

    def _reduce(self, bucket: Bucket, arrays: Sequence[np.ndarray]) -> Steps:
        """Reduces on this host, then between hosts, then spreads on this host; as far as there are such levels."""
        request, dtype = bucket.request, arrays[0].dtype
        members = request.members or self._world
        if self._commons is None or len(members) == 1:
            yield from collectives.allreduce(self._group(bucket, members), arrays, _whole(request, dtype))
            return
        way = route(self._rank, members, self._hosts)
        inner, outer = _whole(request, dtype), None
        if len(way.neighbours) < len(members):
            inner, outer = _levels(request, dtype, len(members))
        if len(way.neighbours) == 1 and outer is None:
            return
        yield from self._reduce_here(bucket, arrays, inner, way, outer)

    def _reduce_here(
        self, bucket: Bucket, arrays: Sequence[np.ndarray], inner: Reduction, way: Route, outer: Reduction | None
    ) -> Steps:
        assert self._commons is not None  # noqa: S101 - for the type checker
        lent: list[np.ndarray] = []

        def between(slices: list[np.ndarray]) -> Steps:
            if way.peers and outer is not None:
                yield from collectives.allreduce(self._group(bucket, way.peers), slices, outer)

        yield from shared.allreduce(
            self._commons.meeting(bucket.sequence % _SLOTS, bucket.sequence, way.neighbours),
            arrays,
            inner,
            chunk=self._chunk,
            pulse=self._pulse,
            take_ring=self._lender(lent),
            between=between if outer is not None else None,
            owners=way.owners,
        )
        for block in lent:
            self._commons.give_back(block)

    def _lender(self, lent: list[np.ndarray]) -> Callable[[int], np.ndarray]:
        """Lends common memory and keeps account of it."""

        def lend(size: int) -> np.ndarray:
            assert self._commons is not None  # noqa: S101 - for the type checker
            lent.append(self._commons.borrow(size))
            return lent[-1]

        return lend

    def _spread(self, bucket: Bucket, meeting: Meeting, blocks: Sequence[np.ndarray]) -> Steps:
        lent: list[np.ndarray] = []
        yield from shared.spread(
            meeting, blocks, chunk=self._chunk, pulse=self._pulse, take_ring=self._lender(lent)
        )
        for block in lent:
            meeting.commons.give_back(block)

    def _land(self, entries: Sequence[Entry], flats: Sequence[np.ndarray]) -> None:
        """Completes operations in place, whose values may have travelled in a copy."""
        self._landed(entries)
        for entry, flat in zip(entries, flats, strict=True):
            array = entry.array
            self.bytes_moved += array.nbytes
            if not array.flags.c_contiguous:
                array[...] = flat.reshape(array.shape)
            entry.finish(array)

    def _broadcast(self, bucket: Bucket) -> Steps:
        """Copies the root's array to all."""
        entry = bucket.entries[0]
        flat = _flat(entry.array)
        members = bucket.request.members or self._world
        root = members.index(entry.request.root)
        if (meeting := self._meeting(bucket, members)) is not None:
            nothing = flat[:0]
            yield from self._spread(bucket, meeting, [flat if index == root else nothing for index in range(len(members))])
        else:
            yield from collectives.broadcast(self._group(bucket, members), flat, root)
        self._land([entry], [flat])

    def _allgather(self, bucket: Bucket) -> Steps:
        """Makes an array whose first dimension is the sum of the members'."""
        entry, sizes = bucket.entries[0], bucket.sizes
        members = bucket.request.members or self._world
        gathered = np.empty((sum(sizes), *entry.array.shape[1:]), entry.array.dtype)
        stops = np.cumsum(sizes)
        blocks = [gathered[stop - size : stop].reshape(-1) for stop, size in zip(stops, sizes, strict=True)]
        blocks[members.index(self._rank)][...] = entry.array.reshape(-1)
        if (meeting := self._meeting(bucket, members)) is not None:
            yield from self._spread(bucket, meeting, blocks)
        else:
            yield from collectives.allgather(self._group(bucket, members), blocks)
        self.bytes_moved += gathered.nbytes
        self._landed([entry])
        entry.finish(gathered)

    def _barrier(self, entry: Entry) -> Steps:
        """That all members have announced it is all there is to a barrier."""
        self._land([entry], [entry.array])
        return
        yield


def _whole(request: Request, dtype: np.dtype) -> Reduction:
    """The arithmetic where all parts meet in one place."""
    return Reduction(request.op, dtype, prescale=request.prescale, postscale=request.postscale)


def _levels(request: Request, dtype: np.dtype, count: int) -> tuple[Reduction, Reduction]:
    """The arithmetic on a host and between hosts; an average is divided on the hosts, where nothing overflows yet."""
    outer = ReduceOp.SUM if request.op is ReduceOp.AVERAGE else request.op
    return (
        Reduction(request.op, dtype, prescale=request.prescale, count=count),
        Reduction(outer, dtype, postscale=request.postscale),
    )


def _flat(array: np.ndarray) -> np.ndarray:
    """The array in C order as one dimension: a view if that is possible, else a copy."""
    return np.ascontiguousarray(array).reshape(-1)
