"""Runs buckets on the data plane: packing, the collective, unpacking; schedules the operations in flight."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from coordd.collectives.dispatch import Plane, Spot
from coordd.collectives.in_flight_check import check
from coordd.collectives.ring import Steps
from coordd.negotiation.bucket import Bucket, Locked
from coordd.negotiation.tensor_table import Entry
from coordd.ops.messages import Kind, Waiting

__all__ = ["Flights", "Outcomes"]

_PACKED_BYTES = 128 << 10
"""Smaller tensors are copied into the bucket's buffer; larger ones are reduced in place, which is cheaper."""
_ACTIVE = 4
_DONE = object()


class Outcomes(Protocol):
    """Callbacks for the end of operations."""

    def landed(self, entries: Sequence[Entry]) -> None:
        """The entries' results have arrived; called before their handles are resolved."""
        ...

    def settled(self, word: Locked, *, moved: bool) -> None:
        """All ranks have voted on a locked bucket, and its data has moved or never will."""
        ...


class _Flight:
    """One operation in flight."""

    __slots__ = ("bucket", "steps", "word")

    def __init__(self, bucket: Bucket | None, steps: Iterator[None], word: Locked | None = None) -> None:
        self.bucket = bucket
        self.steps = steps
        self.word = word


class Flights:
    """Operations in flight.

    Negotiated buckets of a process set start in the order of the plans, a few at a time. Votes on locked buckets start
    at once, because other ranks may wait for them. Operations with the same slot, or the same tags, run one after the
    other: buckets in the order of their numbers, votes in the order in which they are given. So the stamps of a slot
    only grow on every rank, and a rank that shows a later stamp has finished with the earlier ones. A bucket only waits
    for buckets with lower numbers, so ranks never wait for each other in a cycle.
    """

    def __init__(self, plane: Plane, outcomes: Outcomes) -> None:
        self._plane = plane
        self._outcomes = outcomes
        self._queues: dict[tuple[int, ...], deque[Bucket]] = {}
        self._active: list[_Flight] = []
        self._words: list[_Flight] = []
        self._lines: defaultdict[int, deque[Bucket | Locked]] = defaultdict(deque)
        self._abandoned: list[_Flight] = []

    def __len__(self) -> int:
        return len(self._active) + sum(map(len, self._queues.values())) + len(self._words)

    def __bool__(self) -> bool:  # called in every cycle
        return bool(self._active or self._words or self._queues)

    @property
    def heralded(self) -> bool:
        """Whether this rank is woken up whenever an operation in flight can go on."""
        return self._plane.heralded

    @property
    def progress(self) -> tuple[bool, int]:
        """Whether data of negotiated buckets is in flight, and a number that grows whenever any data moves."""
        return bool(self._active or self._queues), self._plane.pulse.beats

    def start(self, bucket: Bucket) -> None:
        """Queues a negotiated bucket, behind those of its process set."""
        if (tape := self._plane.deck.tape) is not None:
            tape.queued(Spot.of_bucket(bucket))
        self._queues.setdefault(bucket.request.members, deque()).append(bucket)
        self._lines[bucket.slot].append(bucket)

    def give(self, word: Locked) -> None:
        """Starts this rank's vote on a locked bucket."""
        spot = Spot.of_word(word, self._plane.lane)
        if (tape := self._plane.deck.tape) is not None and word.bucket is not None:
            tape.queued(spot)
        line = self._lines[spot.slot]
        line.append(word)
        self._words.append(_Flight(word.bucket, self._locked(word, spot, line), word))

    def advance(self) -> bool:
        """Advances the operations in flight; returns whether anything has moved."""
        before = self._plane.pulse.beats
        started = bool(self._queues) and self._start()
        landed = bool(self._active) and _drive(self._active)
        landed |= bool(self._words) and _drive(self._words)
        return started or landed or self._plane.pulse.beats > before

    def _start(self) -> bool:
        """Starts the buckets at the head of their line; returns whether there were any."""
        flying = Counter(flight.bucket.request.members for flight in self._active if flight.bucket is not None)
        ready = []
        for members, queue in self._queues.items():
            room = _ACTIVE - flying[members]
            while room > 0 and queue and self._lines[queue[0].slot][0] is queue[0]:
                ready.append(queue.popleft())
                room -= 1
        self._active += [_Flight(bucket, self._turn(bucket)) for bucket in ready]
        self._queues = {members: queue for members, queue in self._queues.items() if queue}
        return bool(ready)

    def nod_off(self) -> bool:
        """Asks neighbours to wake this rank from now on, and advances a last time; True if something has moved."""
        self._plane.fall_asleep(data=bool(self))
        return self.advance()

    def wake_up(self) -> None:
        """Asks neighbours to stop waking this rank."""
        self._plane.wake_up()

    def waiting(self) -> list[tuple[float, Waiting]]:
        """Returns the operations that wait for other ranks' votes, each with its time of submission."""
        found = []
        for flight in self._words:
            if flight.word is not None and flight.bucket is not None:
                missing = self._plane.missing(Spot.of_word(flight.word, self._plane.lane))
                found += [
                    (entry.handle.submitted, Waiting(entry.request.name, "allreduce", missing))
                    for entry in flight.bucket.entries
                ]
        return found

    def clear(self) -> list[Entry]:
        """Abandons all operations, and returns the entries in flight."""
        flights = [*self._active, *self._words]
        buckets = [*(flight.bucket for flight in flights), *itertools.chain(*self._queues.values())]
        self._abandoned += flights  # keeps their buffers alive, because the network may still write into them
        for gone in (self._active, self._words, self._queues, self._lines):
            gone.clear()
        return [entry for bucket in buckets if bucket is not None for entry in bucket.entries]

    def _turn(self, bucket: Bucket) -> Steps:
        """Runs a negotiated bucket once its turn has come."""
        if (tape := self._plane.deck.tape) is not None:
            tape.mark(Spot.of_bucket(bucket))
        yield from self._steps(bucket)
        self._lines[bucket.slot].popleft()

    def _steps(self, bucket: Bucket) -> Steps:
        check(bucket.entries)
        spot = Spot.of_bucket(bucket)
        match bucket.request.kind:
            case Kind.ALLREDUCE:
                return self._allreduce(spot, bucket)
            case Kind.BROADCAST:
                return self._broadcast(spot, bucket)
            case Kind.ALLGATHER:
                return self._allgather(spot, bucket)
            case Kind.ALLTOALL:
                return self._alltoall(spot, bucket)
            case Kind.REDUCESCATTER:
                return self._reduce_scatter(spot, bucket)
            case Kind.BARRIER | Kind.JOIN:
                return self._meet(spot, bucket)

    def _locked(self, word: Locked, spot: Spot, line: deque[Bucket | Locked]) -> Steps:
        while line[0] is not word:
            yield
        if (tape := self._plane.deck.tape) is not None:
            tape.mark(spot)
        if word.bucket is None:
            yield from self._plane.refuse(spot)
        else:
            check(word.bucket.entries)
            yield from self._allreduce(spot, word.bucket, word)
        line.popleft()

    def _allreduce(self, spot: Spot, bucket: Bucket, word: Locked | None = None) -> Steps:
        """Reduces small tensors in one buffer, and large ones in place."""
        flats = [_flat(entry.array) for entry in bucket.entries]
        small = [flat for flat in flats if flat.nbytes < _PACKED_BYTES]
        arrays = flats
        if len(small) > 1:
            buffer = np.concatenate(small)
            arrays = [buffer, *(flat for flat in flats if flat.nbytes >= _PACKED_BYTES)]
        moved = yield from self._plane.reduce(spot, bucket.request, arrays, absent=bucket.absent, agreed=word is None)
        if moved and len(small) > 1:
            start = 0
            for flat in small:
                stop = start + flat.size
                flat[...] = buffer[start:stop]
                start = stop
        if moved:
            self._land(spot, bucket.entries)
        if word is not None:
            self._outcomes.settled(word, moved=moved)
        if moved:
            self._finish(bucket.entries, flats)

    def _land(self, spot: Spot, entries: Sequence[Entry]) -> None:
        """Records that results are in place, before any handle is resolved."""
        if (tape := self._plane.deck.tape) is not None:
            tape.landed(spot, [(entry.request, entry.handle.submitted) for entry in entries])
        self._outcomes.landed(entries)

    def _finish(self, entries: Sequence[Entry], flats: Sequence[np.ndarray]) -> None:
        """Finishes in-place operations; copies back results that were reduced in a contiguous copy."""
        for entry, flat in zip(entries, flats, strict=True):
            array = entry.array
            if not array.flags.c_contiguous:
                array[...] = flat.reshape(array.shape)
            entry.finish(array)

    def _broadcast(self, spot: Spot, bucket: Bucket) -> Steps:
        """Copies the root's array to all members."""
        entry = bucket.entries[0]
        flat = _flat(entry.array)
        members = bucket.request.members or self._plane.world
        yield from self._plane.broadcast(spot, members, flat, members.index(entry.request.root))
        self._land(spot, [entry])
        self._finish([entry], [flat])

    def _allgather(self, spot: Spot, bucket: Bucket) -> Steps:
        """Creates an array whose first dimension is the sum of the members'."""
        entry, sizes = bucket.entries[0], bucket.sizes
        members = bucket.request.members or self._plane.world
        gathered = np.empty((sum(sizes), *entry.array.shape[1:]), entry.array.dtype)
        stops = np.cumsum(sizes)
        blocks = [gathered[stop - size : stop].reshape(-1) for stop, size in zip(stops, sizes, strict=True)]
        blocks[members.index(self._plane.rank)][...] = entry.array.reshape(-1)
        yield from self._plane.allgather(spot, members, blocks)
        self._land(spot, [entry])
        entry.finish_rows(gathered, sizes)

    def _alltoall(self, spot: Spot, bucket: Bucket) -> Steps:
        """Creates an array of the rows that the members have for this rank."""
        entry = bucket.entries[0]
        members = bucket.request.members or self._plane.world
        array = np.ascontiguousarray(entry.array)
        row = math.prod(array.shape[1:]) * array.itemsize
        splits = [0] * len(members) if entry.splits is None else entry.splits.tolist()
        rows, parts = yield from self._plane.alltoall(spot, members, array.reshape(-1), splits, row)
        received = np.concatenate(parts).view(array.dtype).reshape(sum(rows), *array.shape[1:])
        self._land(spot, [entry])
        entry.finish_rows(received, rows)

    def _reduce_scatter(self, spot: Spot, bucket: Bucket) -> Steps:
        """Creates this member's rows of the reduction; if uneven, the first members have one row more."""
        entry = bucket.entries[0]
        members = bucket.request.members or self._plane.world
        array = np.ascontiguousarray(entry.array)
        blocks = np.array_split(array, len(members))
        result = np.empty_like(blocks[members.index(self._plane.rank)])
        slices = [block.reshape(-1) for block in blocks]
        yield from self._plane.reduce_scatter(spot, bucket.request, slices, result.reshape(-1), absent=bucket.absent)
        self._land(spot, [entry])
        entry.finish(result)

    def _meet(self, spot: Spot, bucket: Bucket) -> Steps:
        """Completes at once: negotiation completes a barrier, and the plan of a join names the last rank to join."""
        entry = bucket.entries[0]
        self._land(spot, [entry])
        entry.finish(np.array(bucket.request.root))
        return
        yield


def _drive(flights: list[_Flight]) -> bool:
    """Advances operations; removes the completed ones, and returns whether there were any."""
    landed = [flight for flight in flights if next(flight.steps, _DONE) is _DONE]
    for flight in landed:
        flights.remove(flight)
    return bool(landed)


def _flat(array: np.ndarray) -> np.ndarray:
    """Returns the array flattened in C order: a view if possible, else a copy."""
    return np.ascontiguousarray(array).reshape(-1)
