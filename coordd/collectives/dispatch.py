"""The data plane as operations see it: dispatches data to common memory, a lane, or both."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from coordd.collectives import alltoall, direct, ring, stepwise
from coordd.collectives.adasum import adasum
from coordd.collectives.direct import Terms
from coordd.collectives.hierarchy import Route, route
from coordd.collectives.ring import Group, Pulse, Reduction, Scratch, Steps
from coordd.negotiation.bucket import Bucket, Locked
from coordd.negotiation.sequence_numbers import SLOTS
from coordd.ops.event_buffer import Deck
from coordd.ops.messages import ReduceOp, Request
from coordd.transport.protocol import Lane
from coordd.transport.shared_memory.host_memory import Commons, Meeting

__all__ = ["Outcome", "Plane", "Spot"]

P = ParamSpec("P")
Ended = TypeVar("Ended")
_TAGS = Group.tags_per_operation + 1
Outcome = Generator[None, None, bool]
"""A generator of steps; its return value is whether any data has moved."""


class Spot(NamedTuple):
    """Where the members of an operation meet, on the boards and over a lane; equal on all of them."""

    slot: int
    stamp: int
    tag: int

    @classmethod
    def of_bucket(cls, bucket: Bucket) -> Spot:
        """Returns the spot of a negotiated bucket; in the lower half of the tags."""
        return cls(bucket.slot, bucket.sequence, bucket.slot * Group.tags_per_operation)

    @classmethod
    def of_word(cls, word: Locked, lane: Lane) -> Spot:
        """Returns the spot of one iteration of a locked bucket; in the upper half of the tags."""
        return cls(SLOTS + word.index, word.lock << 32 | word.occurrence, lane.tags // 2 + word.index * _TAGS)


def _timed(method: Callable[Concatenate[Plane, Spot, P], Generator[None, None, Ended]]) -> Any:
    """Records the start and end of a transfer in the timeline, if one runs."""

    @functools.wraps(method)
    def timed(plane: Plane, spot: Spot, *args: P.args, **kwargs: P.kwargs) -> Generator[None, None, Ended]:
        steps = method(plane, spot, *args, **kwargs)
        tape = plane.deck.tape
        return steps if tape is None else tape.transfer(spot, steps)

    return timed


class Plane:
    """Moves arrays between the members of operations; flat, contiguous, and of equal size on all of them."""

    def __init__(  # noqa: PLR0913 - what there is on the way
        self,
        lane: Lane,
        commons: Commons | None,
        *,
        rank: int,
        hosts: Sequence[str],
        chunk: int,
        deck: Deck | None = None,
    ) -> None:
        """Sets up the transports.

        Args:
            lane: carries data between hosts.
            commons: carries data on this host; None if the lane carries it there, too.
            rank: this rank.
            hosts: the host of every rank.
            chunk: bytes of one chunk of a large tensor.
            deck: holds the timeline's event buffer, which records transfers.
        """
        self.lane = lane
        self.deck = deck or Deck()
        self.world = tuple(range(len(hosts)))
        self.pulse = Pulse()
        self._commons = commons
        self.rank = rank
        self._chunk = chunk
        self._scratch = Scratch()
        self._on_lane = 0
        self._way = functools.cache(lambda members: route(rank, members or self.world, hosts))

    @property
    def heralded(self) -> bool:
        """Whether a wake-up arrives whenever an operation can go on, so that polling is not needed."""
        return self._commons is not None and len(self._commons.ranks) == len(self.world) and not self._on_lane

    def fall_asleep(self, *, data: bool) -> None:
        """Requests wake-ups for messages, and for data if wanted; the caller must check once more afterwards."""
        if self._commons is not None:
            self._commons.mine.fall_asleep(data=data)

    def wake_up(self) -> None:
        """Cancels the request for wake-ups."""
        if self._commons is not None:
            self._commons.mine.wake_up()

    @_timed
    def reduce(
        self, spot: Spot, request: Request, arrays: Sequence[np.ndarray], *, absent: int = 0, agreed: bool = True
    ) -> Outcome:
        """Reduces arrays in place: on this host, then between hosts, then distributes the result on this host.

        Args:
            spot: where the members meet.
            request: the reduction and its members.
            arrays: of one type.
            absent: how many members have joined and contribute nothing.
            agreed: all members will take part; if not, some may `refuse`, and nothing moves.

        Returns:
            whether any data has moved; if not, the arrays are unchanged.
        """
        members = request.members or self.world
        dtype = arrays[0].dtype
        if request.op is ReduceOp.ADASUM:
            yield from self._adasum(spot, request, arrays)
            return True
        whole = _reduction(request, dtype, len(members) - absent)
        if self._commons is None or len(members) == 1:
            group = self._group(spot, members)
            if not agreed and not (yield from self._agree(group, valid=True)):
                return False
            yield from ring.allreduce(group, arrays, whole)
            return True
        way = self._way(request.members)
        several = len(way.neighbours) < len(members)
        levels = _levels(request, dtype, len(members), present=len(members) - absent) if several else (whole, None)
        return (yield from self._reduce_here(spot, arrays, levels, way, agreed=agreed))

    def _adasum(self, spot: Spot, request: Request, arrays: Sequence[np.ndarray]) -> Steps:
        """Runs Adasum over the lane, also on one host, where arrivals cause no wake-up."""
        group = self._group(spot, request.members or self.world)
        self._on_lane += 1
        try:
            for array in arrays:
                yield from adasum(group, array, prescale=request.prescale, postscale=request.postscale)
        finally:
            self._on_lane -= 1

    def refuse(self, spot: Spot) -> Steps:
        """Votes *invalid* on an operation of all ranks, regardless of the other votes."""
        if self._commons is None:
            yield from self._agree(self._group(spot, self.world), valid=False)
            return
        way = self._way(())
        meeting = self._commons.meeting(spot.slot, spot.stamp, way.neighbours)
        while not meeting.enter(word=False):
            yield
        if len(way.neighbours) < len(self.world):
            yield from self._agree_on_levels(spot, meeting, way, valid=False)
        meeting.finish()

    def missing(self, spot: Spot) -> tuple[int, ...]:
        """Returns the other ranks of this host that have not reached an operation of all ranks.

        This rank itself may not have reached it either: it waits until they have finished the previous one of the slot.
        """
        if self._commons is None:
            return ()
        others = {rank: board for rank, board in self._commons.boards.items() if rank != self.rank}
        return tuple(rank for rank, board in others.items() if not board.has_reached(spot.slot, spot.stamp))

    def _reduce_here(
        self,
        spot: Spot,
        arrays: Sequence[np.ndarray],
        levels: tuple[Reduction, Reduction | None],
        way: Route,
        *,
        agreed: bool,
    ) -> Outcome:
        assert self._commons is not None  # noqa: S101 - for the type checker
        inner, outer = levels
        meeting = self._commons.meeting(spot.slot, spot.stamp, way.neighbours)

        def between(slices: list[np.ndarray]) -> Steps:
            if way.peers and outer is not None:
                yield from ring.allreduce(self._group(spot, way.peers), slices, outer)

        while not meeting.enter():
            yield
        if outer is not None and not agreed and not (yield from self._agree_on_levels(spot, meeting, way, valid=True)):
            meeting.finish()
            return False
        loan = _Loan(self._commons)
        terms = Terms(self._chunk, self.pulse, loan.lend)
        if outer is not None:
            terms = terms._replace(between=between, owners=way.owners, partial=inner.sums)
        moved = yield from direct.allreduce(meeting, arrays, inner, terms, doubtful=outer is None and not agreed)
        loan.end()
        return moved

    @_timed
    def broadcast(self, spot: Spot, members: Sequence[int], array: np.ndarray, root: int) -> Steps:
        """Copies the array of the member with index ``root`` into the arrays of all members."""
        if (meeting := self._meeting(spot, members)) is None:
            yield from ring.broadcast(self._group(spot, members), array, root)
            return
        nothing = array[:0]
        blocks = [array if index == root else nothing for index in range(len(members))]
        yield from self._spread(meeting, blocks)

    @_timed
    def allgather(self, spot: Spot, members: Sequence[int], blocks: Sequence[np.ndarray]) -> Steps:
        """Fills the other members' blocks with their data; blocks may differ in size."""
        if (meeting := self._meeting(spot, members)) is None:
            yield from ring.allgather(self._group(spot, members), blocks)
        else:
            yield from self._spread(meeting, blocks)

    def _spread(self, meeting: Meeting, blocks: Sequence[np.ndarray]) -> Steps:
        while not meeting.enter():
            yield
        loan = _Loan(self._commons)
        yield from stepwise.spread(meeting, blocks, Terms(self._chunk, self.pulse, loan.lend))
        loan.end()

    @_timed
    def alltoall(
        self, spot: Spot, members: Sequence[int], array: np.ndarray, splits: Sequence[int], row: int
    ) -> Generator[None, None, tuple[list[int], list[np.ndarray]]]:
        """Sends each member its rows of a flat array; a row has ``row`` bytes.

        Returns:
            how many rows each member had for this rank, and the rows, as bytes.
        """
        data = array.view(np.uint8)
        if (meeting := self._meeting(spot, members)) is not None:
            while not meeting.enter():
                yield
            loan = _Loan(self._commons)
            found = yield from stepwise.alltoall(meeting, data, splits, row, Terms(self._chunk, self.pulse, loan.lend))
            loan.end()
            return found
        group = self._group(spot, members)
        told, received = np.array(splits, np.int64), np.array(splits, np.int64)
        yield from alltoall.counts(group, told, received)
        edges = itertools.pairwise(itertools.accumulate((rows * row for rows in splits), initial=0))
        outgoing = [data[start:stop] for start, stop in edges]
        incoming = [np.empty(rows * row, np.uint8) for rows in received.tolist()]
        incoming[group.me] = outgoing[group.me]
        yield from alltoall.exchange(group, outgoing, incoming)
        return received.tolist(), incoming

    @_timed
    def reduce_scatter(
        self, spot: Spot, request: Request, slices: Sequence[np.ndarray], result: np.ndarray, *, absent: int = 0
    ) -> Steps:
        """Reduces each member's slice of all arrays into its result; the arrays stay unchanged."""
        members = request.members or self.world
        reduction = _reduction(request, result.dtype, len(members) - absent)
        if (meeting := self._meeting(spot, members)) is None:
            yield from alltoall.reduce_scatter(self._group(spot, members), slices, result, reduction)
            return
        while not meeting.enter():
            yield
        loan = _Loan(self._commons)
        terms = Terms(self._chunk, self.pulse, loan.lend)
        yield from stepwise.reduce_scatter(meeting, slices, result, reduction, terms)
        loan.end()

    def _agree(self, group: Group, *, valid: bool) -> Outcome:
        """Exchanges votes over the lane; returns whether all are valid."""
        words = [np.array([valid], np.uint8) for _ in group.members]
        tickets = [group.receive(words[peer], peer, group.word_tag) for peer in group.others()]
        tickets += [group.send(words[group.me], peer, group.word_tag) for peer in group.others()]
        yield from group.finish(tickets)
        return all(found[0] for found in words)

    def _agree_on_levels(self, spot: Spot, meeting: Meeting, way: Route, *, valid: bool) -> Outcome:
        """Collects the votes of this host; the first rank of each host exchanges them with the other hosts."""
        while (others := meeting.words()) is None:
            yield
        if meeting.me == 0:
            meeting.conclude(valid=(yield from self._agree(self._group(spot, way.peers), valid=valid and others)))
        while (verdict := meeting.verdict()) is None:
            yield
        return verdict

    def _group(self, spot: Spot, members: Sequence[int]) -> Group:
        """Returns the members as a group on the lane."""
        return Group(
            self.lane, members, self.rank, tag=spot.tag, chunk=self._chunk, pulse=self.pulse, scratch=self._scratch
        )

    def _meeting(self, spot: Spot, members: Sequence[int]) -> Meeting | None:
        """Returns the members as a meeting in common memory; None if a member is not reachable there."""
        if self._commons is None or len(members) == 1 or any(rank not in self._commons.boards for rank in members):
            return None
        return self._commons.meeting(spot.slot, spot.stamp, members)


class _Loan:
    """Common memory that an operation borrows; after a failure it is never returned, because others may write to it."""

    def __init__(self, commons: Commons | None) -> None:
        assert commons is not None  # noqa: S101 - for the type checker
        self._commons = commons
        self._blocks: list[np.ndarray] = []

    def lend(self, size: int) -> np.ndarray:
        """Borrows at least ``size`` bytes for the operation."""
        self._blocks.append(self._commons.borrow(size))
        return self._blocks[-1]

    def end(self) -> None:
        """Returns all of it: no rank uses it any more."""
        for block in self._blocks:
            self._commons.give_back(block)


def _reduction(request: Request, dtype: np.dtype, present: int) -> Reduction:
    """Returns the arithmetic of a request with ``present`` members that have not joined."""
    count = present if request.op is ReduceOp.AVERAGE_PRESENT else 0
    make = _make_reduction if request.prescale and request.postscale else _make_reduction.__wrapped__  # -0.0 equals 0.0
    return make(request.op, dtype, request.prescale, request.postscale, count)


@functools.lru_cache(maxsize=1024, typed=True)
def _make_reduction(op: ReduceOp, dtype: np.dtype, prescale: float, postscale: float, count: int) -> Reduction:
    """Creates a reduction; it has no state, and training needs few of them again and again."""
    return Reduction(op, dtype, prescale=prescale, postscale=postscale, count=count)


def _levels(request: Request, dtype: np.dtype, count: int, *, present: int) -> tuple[Reduction, Reduction]:
    """Returns the arithmetic on a host and between hosts; averages divide on the hosts, where nothing overflows yet.

    Hosts exchange partial sums, so sixteen-bit floats keep the width in which they are added. Integers are divided
    once, at the end, because each division truncates.
    """
    count = present if request.op is ReduceOp.AVERAGE_PRESENT else count
    if dtype.kind in "iu" and request.op.averages:
        last = Reduction(request.op, dtype, postscale=request.postscale, count=count)
        return Reduction(ReduceOp.SUM, dtype, prescale=request.prescale), last
    inner = Reduction(request.op, dtype, prescale=request.prescale, count=count)
    outer = ReduceOp.SUM if request.op.averages else request.op
    return inner, Reduction(outer, inner.sums or dtype, postscale=request.postscale)
