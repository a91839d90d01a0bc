"""The data of a simulated job: operations that the protocol starts also run on real flights, planes and boards.

The protocol's time is that of `Exchange` and `Words`; here a rank advances its operations in flight whenever it has a
cycle, and all ranks continue to the end when the job is over. So data is often late, and much of it is in flight at
once. This never changes the job, because it has a random generator of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

import numpy as np

from coordd.collectives.scheduler import Flights
from coordd.negotiation.bucket import Bucket, Locked
from coordd.negotiation.sequence_numbers import Numbering
from coordd.negotiation.tensor_table import Entry
from coordd.ops.dtypes import dtype_of
from coordd.ops.messages import Kind, Request
from coordd_tools.sim.cargo import expected, fill
from coordd_tools.sim.ledger import Submission, demand
from coordd_tools.sim.memory import lent, planes
from coordd_tools.sim.script import Round

__all__ = ["Payload"]

_NUMBERINGS = ((2, 1), (2, 2), (3, 4), (16, 16))
_MOST_TURNS = 100_000
_ALIKE = {Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST}  # all ranks get the same


class _Result:
    """The handle of one rank's tensor."""

    submitted = 0.0

    def __init__(self, payload: Payload, rank: int, turn: Round | None) -> None:
        self.name = "" if turn is None else turn.name
        self._payload = payload
        self._rank = rank
        self._turn = turn

    def land(self, value: np.ndarray, _: object) -> None:
        """Checks the result; a joined rank gets none."""
        self._payload.landed += 1
        if self._turn is not None and not self._payload.right(self._turn, self._rank, value):
            wanted = self._payload.wanted(self._turn, self._rank)
            demand(holds=False, text=f"rank {self._rank} gets {value} of {self.name}, not {wanted}")

    def resolve(self, result: object) -> None:
        """Is not called: all operations here have data."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Is not called: nothing here fails."""
        raise error


class _Rank:
    """The operations in flight of one rank; the `Outcomes` of its flights."""

    def __init__(self, payload: Payload, rank: int) -> None:
        self.rank = rank
        self.awake = True
        self.moved: dict[tuple[int, int, int], bool] = {}
        self._payload = payload

    def begin(self, flights: Flights) -> None:
        """Takes the rank's flights."""
        self.flights = flights

    def wake(self) -> None:
        """Is called as the wake-up."""
        self.awake = True

    def advance(self) -> None:
        """Advances operations in flight; sleeps if none has progressed."""
        self.flights.wake_up()
        self.awake = self.flights.advance() or self.flights.nod_off()

    def entry(self, entry: Entry) -> Entry:
        """Returns a copy of one of the protocol's entries, with data."""
        made = entry.handle
        if not isinstance(made, Submission):
            return Entry(entry.request, entry.array.copy(), _Result(self._payload, self.rank, None))
        array = self._payload.brought(made.turn, self.rank)
        found = Entry(made.part.request, array, _Result(self._payload, self.rank, made.turn))
        if made.part.request.kind is Kind.ALLTOALL:
            found.splits = np.array(_splits(made.turn, self.rank))
        return found

    def bucket(self, bucket: Bucket) -> Bucket:
        """Returns a copy of one of the protocol's buckets, with data."""
        entries = tuple(self.entry(entry) for entry in bucket.entries)
        return Bucket(bucket.sequence, bucket.request, bucket.sizes, entries, bucket.absent, bucket.slot)

    def landed(self, entries: Sequence[Entry]) -> None:
        """Ignores that results have arrived."""

    def settled(self, word: Locked, *, moved: bool) -> None:
        """Checks that the outcome of a vote is the same on all ranks."""
        key = (word.lock, word.index, word.occurrence)
        first = self._payload.moved.setdefault(key, moved)
        demand(moved == first, f"rank {self.rank} hears that {key} has moved: {moved}, others hear {first}")


class Payload:
    """The data plane of all ranks."""

    def __init__(self, rng: Random, hosts: Sequence[str]) -> None:
        """Creates the data planes.

        Args:
            rng: the random generator.
            hosts: the host of every rank.
        """
        self.landed = 0
        self.moved: dict[tuple[int, int, int], bool] = {}
        self._rng = rng
        self._wanted: dict[tuple[Round, int], np.ndarray] = {}
        self._numbering = rng.choice(_NUMBERINGS)
        self._ranks = [_Rank(self, rank) for rank in range(len(hosts))]
        self._planes, self._lanes = planes(
            hosts, shared=rng.random() < 0.8, chunk=4096, wake=[rank.wake for rank in self._ranks]
        )
        for rank, plane in zip(self._ranks, self._planes, strict=True):
            rank.begin(Flights(plane, rank))

    def numbering(self) -> Numbering:
        """Returns the numbering of a rank, with so few slots that they are reused all the time."""
        groups, depth = self._numbering
        return Numbering(groups=groups, depth=depth)

    def start(self, rank: int, bucket: Bucket) -> None:
        """Starts a negotiated bucket on a rank; ignores a broadcast from outside its set: no real script has one."""
        request = bucket.request
        if request.kind is Kind.BROADCAST and request.members and request.root not in request.members:
            return
        self._ranks[rank].flights.start(self._ranks[rank].bucket(bucket))

    def give(self, rank: int, word: Locked) -> None:
        """Casts a rank's vote."""
        bucket = None if word.bucket is None else self._ranks[rank].bucket(word.bucket)
        self._ranks[rank].flights.give(Locked(word.lock, word.index, word.occurrence, bucket))

    def advance(self, rank: int) -> None:
        """Advances a rank's operations in flight, in some of its cycles."""
        if self._ranks[rank].flights and self._rng.random() < 0.5:
            self._ranks[rank].advance()

    def stop(self, rank: int) -> None:
        """Drops the operations in flight of a rank that has crashed or knows of a failure."""
        self._ranks[rank].flights.clear()

    def close(self, *, failed: bool) -> None:
        """Advances all ranks until everything is complete; after a failure, as far as possible."""
        for rank in self._ranks:
            rank.awake = True
        for _ in range(_MOST_TURNS):
            awake = [rank for rank in self._ranks if rank.awake]
            if not awake:
                break
            self._rng.choice(awake).advance()
        if failed:
            return
        for rank, plane in zip(self._ranks, self._planes, strict=True):
            demand(not rank.flights, f"rank {rank.rank} waits for data in vain, {len(rank.flights)} operations")
            demand(lent(plane) == 0, f"operations that have ended keep {lent(plane)} blocks of rank {rank.rank}")
        mail = self._lanes.collective
        demand(not mail._sent and not mail._wanted, "messages have no sender, or no receiver")  # noqa: SLF001 - looking inside

    def brought(self, turn: Round, rank: int) -> np.ndarray:
        """Returns the array that a rank contributes to a round."""
        part = turn.parts[rank]
        array = np.zeros(part.request.shape, dtype_of(part.request.dtype))
        if not part.filler:
            fill(array, turn.number, rank)
        return array

    def right(self, turn: Round, rank: int, value: np.ndarray) -> bool:
        """Returns whether a rank's result is right."""
        kind = turn.parts[rank].request.kind
        return kind in {Kind.BARRIER, Kind.JOIN} or np.array_equal(value, self.wanted(turn, rank))

    def wanted(self, turn: Round, rank: int) -> np.ndarray:
        """Returns the result that a rank must get."""
        key = (turn, -1 if turn.parts[rank].request.kind in _ALIKE else rank)
        if key not in self._wanted:
            self._wanted[key] = self._worked_out(turn, rank)
        return self._wanted[key]

    def _worked_out(self, turn: Round, rank: int) -> np.ndarray:
        request = turn.parts[rank].request
        everyone = tuple(sorted({*turn.parts, *turn.absent}))
        whole = Request(
            request.kind,
            request.name,
            request.dtype,
            request.shape,
            request.op,
            request.root,
            prescale=request.prescale,
            members=everyone,
        )
        inputs = {other: self.brought(turn, other) for other in sorted(turn.parts)}
        splits = {other: _splits(turn, other) for other in turn.parts}
        return expected(whole, inputs, rank, splits)


def _splits(turn: Round, rank: int) -> list[int]:
    """Returns the rows that a rank has for each member in an alltoall."""
    shape = turn.parts[rank].request.shape
    count = len(turn.parts) + len(turn.absent)
    rows = shape[0] if shape else 0
    edges = [rows * place // count for place in range(count + 1)]
    return [stop - start for start, stop in itertools.pairwise(edges)]
