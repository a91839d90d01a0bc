"""The data plane as the protocol sees it: a bucket moves when all its members have started it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from coordd.negotiation.worker import Bucket
from coordd.ops.messages import Kind
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.ledger import Ledger, Submission, demand

__all__ = ["Cargo", "Exchange", "submissions"]

_MEAN = 3e-4


class Cargo(NamedTuple):
    """The contents of a bucket when it starts; its entries hold other data later, because ranks reuse them.

    A joined rank has the names, but no submissions.
    """

    made: list[Submission]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    absent: int


class Exchange:
    """Matches the buckets of all ranks by sequence number, and checks that they are equal."""

    def __init__(self, agenda: Agenda, rng: Random, ledger: Ledger, *, fusion_bytes: int) -> None:
        self._agenda = agenda
        self._rng = rng
        self._ledger = ledger
        self._fusion_bytes = fusion_bytes
        self._meeting: dict[int, dict[int, tuple[Bucket, Cargo, Callable[[Bucket], None]]]] = {}
        self._last: dict[tuple[int, tuple[int, ...]], int] = {}
        self._moved: set[Submission] = set()
        self._dead: set[int] = set()

    def join(self, rank: int, bucket: Bucket, landed: Callable[[Bucket], None]) -> None:
        """Starts a bucket on one rank; ``landed`` is called when its data has arrived there."""
        line = (rank, bucket.request.members)
        demand(bucket.sequence > self._last.get(line, 0), f"rank {rank} starts bucket {bucket.sequence} out of order")
        self._last[line] = bucket.sequence
        meeting = self._meeting.setdefault(bucket.sequence, {})
        cargo = self.inspect(f"bucket {bucket.sequence}", rank, bucket, [other for _, other, _ in meeting.values()])
        made = cargo.made
        for one in made:
            demand(self._ledger.heard(one.turn), f"{one!r} was released before all members had announced it")
            absent = len(one.turn.absent)
            demand(bucket.absent == absent, f"{one!r} goes without {bucket.absent} ranks, not {absent}")
        self.move(made)
        meeting[rank] = (bucket, cargo, landed)
        turns = [one.turn for _, other, _ in meeting.values() for one in other.made]
        if turns and len(meeting) == len(turns[0].members) + len(turns[0].absent):
            self._move(bucket.sequence)

    def inspect(self, what: str, rank: int, bucket: Bucket, others: Sequence[Cargo]) -> Cargo:
        """Checks that a bucket is legal, and the same on other ranks; returns its contents."""
        made = submissions(bucket)
        mine = Cargo(made, tuple(entry.request.name for entry in bucket.entries), bucket.sizes, bucket.absent)
        if made and not any(other.made for other in others):
            self._inspect(what, bucket, made)
        for other in others:
            demand(mine[1:] == other[1:], f"{what}: {mine[1:]} against {other[1:]}")
            here, there = [one.turn for one in made], [one.turn for one in other.made]
            demand(here == there or not (here and there), f"{what} holds {made} here and {other.made} there")
        for one in made:
            demand(one.rank == rank, f"rank {rank} has {one!r} in {what}")
        demand(len(made) in {0, len(mine.names)}, f"rank {rank} has made only {made} of {what}")
        return mine

    def move(self, made: Iterable[Submission]) -> None:
        """Records submissions as carried out; each of them may be carried out once."""
        for one in made:
            demand(one not in self._moved, f"{one!r} is carried out twice")
            self._moved.add(one)

    def crash(self, rank: int) -> None:
        """Removes a rank: its data may be missing on other ranks, even if it had finished its own part."""
        self._dead.add(rank)

    def _move(self, sequence: int) -> None:
        meeting = self._meeting.pop(sequence)

        def arrive(rank: int) -> None:
            if self._dead.isdisjoint(meeting) or self._rng.randrange(2):
                bucket, _, landed = meeting[rank]
                landed(bucket)

        for rank in meeting:
            self._agenda.after(self._rng.expovariate(1 / _MEAN), partial(arrive, rank))

    def _inspect(self, what: str, bucket: Bucket, made: list[Submission]) -> None:
        """Checks that fused submissions have equal attributes, and no more bytes than allowed."""
        first = made[0].part.request
        alike = (first.kind, first.dtype, first.op, first.prescale, first.postscale, first.members)
        for one in made:
            own = one.part.request
            found = (own.kind, own.dtype, own.op, own.prescale, own.postscale, own.members)
            demand(found == alike, f"{what} mixes {found} with {alike}")
        turn = made[0].turn
        rows = dict.fromkeys(turn.absent, 0) | {rank: sum(part.request.shape[:1]) for rank, part in turn.parts.items()}
        sizes = tuple(rows[rank] for rank in sorted(rows)) if first.kind is Kind.ALLGATHER else ()
        demand(bucket.sizes == sizes, f"{what} has the first dimensions {bucket.sizes}, not {sizes}")
        filled = sum(_bytes(one) for one in made)
        demand(len(made) == 1 or filled <= self._fusion_bytes, f"{what} has {filled} bytes")


def submissions(bucket: Bucket) -> list[Submission]:
    """Returns the submissions in a bucket."""
    return [entry.handle for entry in bucket.entries if isinstance(entry.handle, Submission)]


def _bytes(made: Submission) -> int:
    count = 1
    for length in made.part.request.shape:
        count *= length
    return (
        count * {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}[made.part.request.dtype]
    )
