"""Simulates the data plane alone, from one seed: overlapping process sets, buckets of all kinds, votes between them.

Real `Flights` on real planes, all ranks in one thread. Every rank gets the same buckets in the same order, as from
plans, and votes on locked buckets in an order of its own; some ranks are slow for a while. A rank with nothing to do
sleeps until its wake-up. If all ranks sleep before the end, they wait for each other: this is found at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from coordd.collectives.scheduler import Flights
from coordd.negotiation.bucket import Bucket, Locked
from coordd.negotiation.sequence_numbers import Numbering
from coordd.negotiation.tensor_table import Entry
from coordd.ops.dtypes import dtype_of
from coordd.ops.messages import Kind, ReduceOp, Request
from coordd_tools.sim.cargo import expected, fill
from coordd_tools.sim.ledger import Violation, demand
from coordd_tools.sim.memory import lent, planes

__all__ = ["Moved", "move"]

_KINDS = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER, Kind.BARRIER)
_WEIGHTS = (6, 3, 1, 1, 1, 1)
_NUMBERINGS = ((2, 1), (2, 2), (3, 4), (16, 16))
_SPOILT = 77
_LONG = 0.03
_MOST_TURNS = 20_000


@dataclass(frozen=True)
class Moved:
    """The summary of a run."""

    seed: int
    ranks: int
    buckets: int
    words: int
    turns: int


class _Result:
    """A handle: the result of one tensor on one rank."""

    submitted = 0.0

    def __init__(self, job: _Job, rank: int, array: np.ndarray) -> None:
        self.name = job.request.name
        self.done = False
        self.job = job
        self._rank = rank
        self._array = array

    def land(self, value: np.ndarray, _: object) -> None:
        """Checks the result, and overwrites the memory, as the next step of a program does."""
        demand(not self.done, f"{self.name} ends twice on rank {self._rank}")
        self.done = True
        wanted = self.job.wanted(self._rank)
        same = self.job.request.kind is Kind.BARRIER or np.array_equal(value, wanted)
        if not same:  # the text takes long
            demand(same, f"rank {self._rank} gets {value} of {self.job}, not {wanted}")
        self._array[...] = _SPOILT

    def resolve(self, result: object) -> None:
        """Is not called: all operations here have data."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Is not called: nothing here fails."""
        raise error

    @property
    def unmoved(self) -> bool:
        """Whether the memory is as it was submitted."""
        return not self.done and np.array_equal(self._array, self.job.inputs[self._rank])

    @property
    def untouched(self) -> bool:
        """Whether the memory is as the program left it, after the result."""
        return bool((self._array == _SPOILT).all())


class _Job:
    """One tensor, with its input on each member and the results that they must get."""

    def __init__(self, rng: Random, key: int, request: Request, length: int) -> None:
        self.request = request
        self.key = key
        self.ranks = request.members
        uneven = request.kind in {Kind.ALLGATHER, Kind.ALLTOALL}
        rows = {rank: rng.randint(0, 2 * length) if uneven else length for rank in self.ranks}
        self.sizes = tuple(rows[rank] for rank in self.ranks) if request.kind is Kind.ALLGATHER else ()
        self.splits = {rank: _divided(rng, rows[rank], len(self.ranks)) for rank in self.ranks}
        self.inputs = {rank: np.empty((rows[rank], *request.shape[1:]), dtype_of(request.dtype)) for rank in self.ranks}
        for rank, array in self.inputs.items():
            fill(array, key, 0 if request.op is ReduceOp.ADASUM else rank)

    def wanted(self, rank: int) -> np.ndarray:
        """Returns the result that a rank must get."""
        return expected(self.request, self.inputs, rank, self.splits)

    def entry(self, rank: int, place: Callable[[np.ndarray], np.ndarray]) -> Entry:
        """Returns a rank's entry, with memory of its own."""
        request = self.request
        array = place(self.inputs[rank])
        entry = Entry(request, array, _Result(self, rank, array))
        if request.kind is Kind.ALLTOALL:
            entry.splits = np.array(self.splits[rank])
        return entry

    def __repr__(self) -> str:
        return f"{self.request.kind.name} {self.request.name} of {self.ranks}"


def _divided(rng: Random, rows: int, parts: int) -> list[int]:
    edges = sorted(rng.randint(0, rows) for _ in range(parts - 1))
    return [stop - start for start, stop in zip([0, *edges], [*edges, rows], strict=True)]


@dataclass(frozen=True)
class _Planned:
    """A negotiated bucket; ``members`` is empty for the set of all ranks."""

    members: tuple[int, ...]
    jobs: tuple[_Job, ...]


@dataclass(frozen=True)
class _Word:
    """One iteration of a locked bucket: its tensors, and the ranks that vote invalid."""

    lock: int
    index: int
    occurrence: int
    jobs: tuple[_Job, ...]
    unwilling: frozenset[int]


class _Author:
    """Draws the buckets and votes of a run."""

    def __init__(self, rng: Random, size: int) -> None:
        self._rng = rng
        self._everyone = tuple(range(size))
        self._key = 0
        self._sets = [self._everyone, *(self._set() for _ in range(rng.randint(1, 6)))]
        self.large = rng.choice((0.0, 0.0, 0.0, 0.05))

    def buckets(self) -> list[_Planned]:
        """Draws negotiated buckets; sometimes many of one set in a row, so that they wait for each other."""
        found: list[_Planned] = []
        rows = self._rng.randint(30, 60) if self._rng.random() < _LONG else self._rng.randint(1, 9)
        for _ in range(rows):
            ranks = self._rng.choice(self._sets)
            row = self._rng.choice((1, 1, 2, 7))
            found += [self._bucket(ranks) for _ in range(row)]
        return found

    def words(self) -> list[list[_Word]]:
        """Draws the votes: for each locked bucket, in the order in which every rank casts them."""
        lines: list[list[_Word]] = [[] for _ in range(self._rng.randint(0, 3))]
        for lock in range(5, 5 + self._rng.randint(1, 2)):
            for index, line in enumerate(lines):
                steps = self._rng.randint(0, 4)
                for occurrence in range(1, steps + 1):
                    most = len(self._everyone) if occurrence == steps else 0
                    unwilling = frozenset(self._rng.sample(self._everyone, self._rng.randint(0, most)))
                    line.append(_Word(lock, index, occurrence, self._reductions(self._everyone), unwilling))
        return lines

    def _bucket(self, ranks: tuple[int, ...]) -> _Planned:
        members = () if ranks == self._everyone else ranks
        kind = self._rng.choices(_KINDS, _WEIGHTS)[0]
        if kind is Kind.ALLREDUCE and self._rng.random() < 0.95:
            return _Planned(members, self._reductions(ranks))
        op = ReduceOp.ADASUM if kind is Kind.ALLREDUCE else ReduceOp.SUM
        dtype = "float32" if op is ReduceOp.ADASUM else "int64"
        return _Planned(members, (self._job(kind, ranks, dtype, op),))

    def _reductions(self, ranks: tuple[int, ...]) -> tuple[_Job, ...]:
        dtype = self._rng.choice(("int64", "int64", "float32", "bfloat16"))
        op = self._rng.choice((ReduceOp.SUM, ReduceOp.MAX))
        return tuple(self._job(Kind.ALLREDUCE, ranks, dtype, op) for _ in range(self._rng.choice((1, 1, 3))))

    def _job(self, kind: Kind, ranks: tuple[int, ...], dtype: str, op: ReduceOp) -> _Job:
        self._key += 1
        rng = self._rng
        length = rng.randint(4000, 9000) if rng.random() < self.large else rng.choice((0, 1, 3, rng.randint(0, 200)))
        root = rng.choice(ranks) if kind is Kind.BROADCAST else -1
        shape = (length, 2) if kind in {Kind.ALLGATHER, Kind.ALLTOALL} else (length,)
        return _Job(rng, self._key, Request(kind, f"t{self._key}", dtype, shape, op, root, members=ranks), length)

    def _set(self) -> tuple[int, ...]:
        count = min(len(self._everyone), self._rng.choice((1, 2, 2, 3, len(self._everyone) - 1)))
        return tuple(sorted(self._rng.sample(self._everyone, count)))


class _Rank:
    """One rank: its pending buckets and votes, and its operations in flight; the `Outcomes` of its flights."""

    def __init__(self, world: _World, rank: int) -> None:
        self.rank = rank
        self.awake = True
        self.speed = 1.0
        self._world = world
        self._rng = world.rng
        self._numbering = Numbering(groups=world.numbering[0], depth=world.numbering[1])
        self._buckets = deque(world.buckets)
        self._lines = [deque(line) for line in world.lines if line]
        self._results: list[_Result] = []
        self._idle = False

    def begin(self, plane: Any) -> None:
        """Takes the rank's data plane."""
        self.plane = plane
        self.flights = Flights(plane, self)

    def wake(self) -> None:
        """Is called as the wake-up."""
        self.awake = True

    @property
    def heard_all(self) -> bool:
        """Whether nothing more will be started on this rank."""
        return not self._buckets and not self._lines

    def turn(self) -> None:
        """Starts something, or advances operations in flight; sleeps, one turn later, if there is nothing to do."""
        if not self.heard_all and self._rng.random() < 0.5:
            self.hear()
        elif self._idle and not self.flights.nod_off():
            self.awake = False
            return
        self.flights.wake_up()
        turns = self._rng.choice((1, 1, 2, 8))
        self._idle = not all(self.flights.advance() for _ in range(turns))

    def hear(self) -> None:
        """Starts the next buckets, or casts a vote."""
        self.awake = True
        self.flights.wake_up()
        lines = [line for line in self._lines if line]
        if self._buckets and (not lines or self._rng.random() < 0.7):
            for _ in range(min(len(self._buckets), self._rng.choice((1, 2, 12)))):
                self._follow(self._buckets.popleft())
        elif lines:
            self._give(self._rng.choice(lines).popleft())
        self._lines = [line for line in self._lines if line]

    def _follow(self, planned: _Planned) -> None:
        sequence, slot = self._numbering.next(planned.members)
        if self.rank in planned.jobs[0].ranks:
            self.flights.start(self._bucket(planned.jobs, planned.members, sequence, slot))

    def _give(self, word: _Word) -> None:
        willing = self.rank not in word.unwilling
        bucket = self._bucket(word.jobs, (), 0, 0) if willing else None
        self.flights.give(Locked(word.lock, word.index, word.occurrence, bucket))

    def _bucket(self, jobs: Sequence[_Job], members: tuple[int, ...], sequence: int, slot: int) -> Bucket:
        entries = tuple(job.entry(self.rank, self._place) for job in jobs)
        self._results += [entry.handle for entry in entries if isinstance(entry.handle, _Result)]
        first = jobs[0].request
        request = Request(first.kind, first.name, first.dtype, first.shape, first.op, first.root, members=members)
        return Bucket(sequence, request, jobs[0].sizes, entries, slot=slot)

    def _place(self, array: np.ndarray) -> np.ndarray:
        """Returns a copy, sometimes in shared memory."""
        commons = self.plane._commons  # noqa: SLF001 - as a framework's gradients get there
        if commons is None or array.size == 0 or self._rng.random() < 0.7:
            return array.copy()
        self._world.resident[self.rank] += 1
        found: np.ndarray = commons.heap.allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        found[...] = array
        return found

    def landed(self, entries: Sequence[Entry]) -> None:
        """Ignores that results have arrived."""

    def settled(self, word: Locked, *, moved: bool) -> None:
        """Checks the outcome of a vote."""
        unwilling = self._world.word(word).unwilling
        demand(
            moved == (not unwilling), f"rank {self.rank} hears that {word} has moved: {moved}, unwilling: {unwilling}"
        )

    def look_back(self) -> None:
        """Checks that everything has ended, and that no rank has written to this rank's memory afterwards."""
        refused = {job.key for line in self._world.lines for word in line if word.unwilling for job in word.jobs}
        for result in self._results:
            if result.job.key in refused:
                demand(result.unmoved, f"{result.name} has changed on rank {self.rank}, though it was refused")
            else:
                demand(result.done, f"{result.name} has not ended on rank {self.rank}")
                demand(result.untouched, f"{result.name} was written to on rank {self.rank} after its end")
        held = lent(self.plane) - self._world.resident[self.rank]
        demand(held == 0, f"operations that have ended keep {held} blocks of rank {self.rank}")


class _World:
    """All ranks of a run."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        size = rng.randint(2, 6)
        author = _Author(rng, size)
        self.numbering = rng.choice(_NUMBERINGS)
        self.buckets = author.buckets()
        self.lines = author.words()
        self.resident = [0] * size
        self._words = {(word.lock, word.index, word.occurrence): word for line in self.lines for word in line}
        self.ranks = [_Rank(self, rank) for rank in range(size)]
        hosts = tuple(rng.choice("aab") for _ in range(size)) if rng.random() < 0.4 else ("a",) * size
        made, self._lanes = planes(
            hosts,
            shared=rng.random() < 0.8,
            chunk=4096 if author.large else rng.choice((64, 256, 4096)),
            wake=[rank.wake for rank in self.ranks],
        )
        for rank, plane in zip(self.ranks, made, strict=True):
            rank.begin(plane)

    def word(self, word: Locked) -> _Word:
        """Returns the drawn iteration that a vote belongs to."""
        return self._words[word.lock, word.index, word.occurrence]

    def run(self) -> int:
        """Gives turns to ranks until all is done; returns the number of turns."""
        turns = 0
        for rank in self._chosen():
            turns += 1
            demand(turns < _MOST_TURNS, f"nothing has come to an end after {turns} turns")
            rank.turn()
        for rank in self.ranks:
            demand(not rank.flights, f"rank {rank.rank} sleeps, with {len(rank.flights)} operations under way")
            rank.look_back()
        mail = self._lanes.collective
        demand(not mail._sent, "messages were sent that nobody has received")  # noqa: SLF001 - looking inside
        demand(not mail._wanted, "messages are waited for that nobody sends")  # noqa: SLF001 - as above
        return turns

    def _chosen(self) -> Iterator[_Rank]:
        """Yields the rank of each turn until all sleep and have started everything; some ranks are slow for a while."""
        turns = 0
        while True:
            if turns % 64 == 0:
                for rank in self.ranks:
                    rank.speed = self.rng.choice((1.0, 1.0, 0.1, 0.003))
            turns += 1
            ready = [rank for rank in self.ranks if rank.awake]
            if not ready and not (ready := [rank for rank in self.ranks if not rank.heard_all]):
                return
            (rank,) = self.rng.choices(ready, [each.speed for each in ready])
            if not rank.awake:
                rank.hear()
            yield rank


def move(seed: int) -> Moved:
    """Runs the data plane from a seed.

    Raises:
        Violation: a result is wrong or missing.
    """
    world = _World(Random(seed))  # noqa: S311 - a repeatable source is the point
    try:
        turns = world.run()
    except Violation:
        raise
    except Exception as error:
        text = f"the data plane has raised {type(error).__name__}: {error}"
        raise Violation(text) from error
    return Moved(seed, len(world.ranks), len(world.buckets), len(world._words), turns)  # noqa: SLF001 - its own
