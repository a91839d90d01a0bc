"""Shared-memory operations in rounds: in each round every member contributes one piece.

In a round each member makes a piece of its own readable, in a small ring of places that stays in the caches, and reads
from the others' pieces the data it needs. A member is never more than one ring ahead of the slowest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence

import numpy as np

from coordd.collectives.direct import RING, Terms
from coordd.collectives.ring import Reduction, Steps
from coordd.transport.shared_memory.host_memory import Meeting

__all__ = ["alltoall", "reduce_scatter", "spread"]

Lay = Callable[[int, np.ndarray], None]
"""Copies this rank's piece of a round, by number, to a place of ``chunk`` bytes."""
Take = Callable[[int, Callable[[int], np.ndarray]], None]
"""Copies the data that this rank needs in a round; the second argument maps a member to its place."""


def _in_rounds(  # noqa: PLR0913 - what there is to a round
    meeting: Meeting, rounds: int, terms: Terms, lay: Lay | None, take: Take, *, told: int = 0
) -> Steps:
    """Runs the rounds.

    Args:
        meeting: the members' meeting point, which this rank has entered.
        rounds: number of rounds; equal on all members.
        terms: how the operation is carried out.
        lay: None if this rank has no data in any round.
        take: runs once a round, when all members' pieces are readable.
        told: the `Meeting.lay_open` count reached before the first round; equal on all members.
    """
    chunk = terms.chunk
    ring = terms.lend(min(RING, rounds) * chunk) if lay is not None and rounds else None
    meeting.place(0, None if ring is None else meeting.commons.heap.locate(ring))
    opened = taken = 0
    while not (taken == rounds and meeting.all_reduced(rounds)):
        before = opened + taken
        free = opened < RING or (opened - taken < RING and meeting.all_reduced(opened - RING + 1))
        if opened < rounds and free:
            if lay is not None and ring is not None:
                at = opened % RING * chunk
                lay(opened, ring[at : at + chunk])
            opened += 1
            meeting.lay_open(told + opened)
        if taken < opened and meeting.all_open(told + taken + 1):
            at = taken % RING * chunk
            take(taken, lambda member, at=at: meeting.place_of(member, 0)[at : at + chunk])  # type: ignore[misc]  # a default
            taken += 1
            meeting.hand_out(taken)
        if opened + taken == before:
            yield
        else:
            terms.pulse.beats += 1
    meeting.finish()


def spread(meeting: Meeting, blocks: Sequence[np.ndarray], terms: Terms) -> Steps:
    """Fills the other members' flat contiguous blocks with their data (allgather).

    Args:
        meeting: the members' meeting point, which this rank has entered.
        blocks: one per member; sizes may differ, and may be zero.
        terms: how the operation is carried out.
    """
    chunk = terms.chunk
    data = [block.view(np.uint8) for block in blocks]
    mine = data[meeting.me]

    def lay(number: int, place: np.ndarray) -> None:
        piece = mine[number * chunk : (number + 1) * chunk]
        place[: piece.size] = piece

    def take(number: int, place_of: Callable[[int], np.ndarray]) -> None:
        for member, block in enumerate(data):
            piece = block[number * chunk : (number + 1) * chunk]
            if member != meeting.me and piece.size:
                piece[...] = place_of(member)[: piece.size]

    rounds = -(-max(block.size for block in data) // chunk)
    return _in_rounds(meeting, rounds, terms, lay if mine.size else None, take)


def alltoall(
    meeting: Meeting, outgoing: np.ndarray, splits: Sequence[int], row: int, terms: Terms
) -> Generator[None, None, tuple[list[int], list[np.ndarray]]]:
    """Sends each member its part of this rank's array, and receives this rank's parts of theirs.

    Args:
        meeting: the members' meeting point, which this rank has entered.
        outgoing: flat bytes, the members' parts one after the other.
        splits: rows of each part.
        row: bytes of a row.
        terms: how the operation is carried out.

    Returns:
        The number of rows that each member had for this rank, and the rows as bytes; this rank's own rows are a view of
        ``outgoing``.
    """
    members = len(meeting.members)
    meeting.inline(meeting.commons.rank)[: 8 * members] = np.array(splits, np.int64).tobytes()
    meeting.lay_open(1)
    while not meeting.all_open(1):
        yield
    table = [np.frombuffer(meeting.inline(rank)[: 8 * members], np.int64) for rank in meeting.members]
    received = [int(line[meeting.me]) for line in table]
    starts = [int(line[: meeting.me].sum()) * row for line in table]
    found = [np.empty(rows * row, np.uint8) for rows in received]
    found[meeting.me] = outgoing[starts[meeting.me] :][: found[meeting.me].size]
    chunk = terms.chunk

    def lay(number: int, place: np.ndarray) -> None:
        piece = outgoing[number * chunk : (number + 1) * chunk]
        place[: piece.size] = piece

    def take(number: int, place_of: Callable[[int], np.ndarray]) -> None:
        for member, (start, part) in enumerate(zip(starts, found, strict=True)):
            low = max(start, number * chunk)
            high = min(start + part.size, (number + 1) * chunk)
            if member != meeting.me and low < high:
                part[low - start : high - start] = place_of(member)[low - number * chunk : high - number * chunk]

    rounds = -(-max(int(line.sum()) for line in table) * row // chunk)
    yield from _in_rounds(meeting, rounds, terms, lay if outgoing.size else None, take, told=1)
    return received, found


def reduce_scatter(
    meeting: Meeting, slices: Sequence[np.ndarray], result: np.ndarray, reduction: Reduction, terms: Terms
) -> Steps:
    """Reduces every member's slice of all members' arrays; no member's array changes.

    Args:
        meeting: the members' meeting point, which this rank has entered.
        slices: this rank's flat contiguous array, cut into one slice per member; of equal lengths on all members.
        result: of the length of this rank's slice.
        reduction: the arithmetic.
        terms: how the operation is carried out.
    """
    dtype = result.dtype
    terms = terms._replace(chunk=max(terms.chunk, len(slices) * dtype.itemsize))
    step = max(1, terms.chunk // dtype.itemsize // len(slices))

    def cuts(number: int) -> list[tuple[int, int]]:
        """Returns where the members' parts of a round lie in a place, in elements."""
        sizes = [part[number * step : (number + 1) * step].size for part in slices]
        return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))

    def lay(number: int, place: np.ndarray) -> None:
        room = place[: place.size // dtype.itemsize * dtype.itemsize].view(dtype)
        for part, (start, stop) in zip(slices, cuts(number), strict=True):
            room[start:stop] = part[number * step : (number + 1) * step]
            reduction.prepare(room[start:stop])

    def take(number: int, place_of: Callable[[int], np.ndarray]) -> None:
        start, stop = (edge * dtype.itemsize for edge in cuts(number)[meeting.me])
        if start < stop:
            # No other rank reads these slices, so the running total may be kept in the first of them.
            parts = [place_of(member)[start:stop].view(dtype) for member in range(len(slices))]
            reduction.combine(parts, result[number * step : (number + 1) * step])

    rounds = -(-max(part.size for part in slices) // step)
    return _in_rounds(meeting, rounds, terms, lay, take)
