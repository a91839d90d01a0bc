"""Collectives in which every member receives different data from each of the others, over a lane.

Messages are sent in pieces: both ends of a pair know the number of bytes, so both know the number of pieces; empty
pieces are not sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from coordd.collectives.ring import Group, Reduction, Steps, windowed

__all__ = ["counts", "cut", "exchange", "reduce_scatter"]


def cut(array: np.ndarray, count: int) -> list[np.ndarray]:
    """Cuts a flat array into consecutive slices of nearly equal size, one per member."""
    bounds = [array.size * index // count for index in range(count + 1)]
    return [array[start:stop] for start, stop in itertools.pairwise(bounds)]


def counts(group: Group, told: np.ndarray, heard: np.ndarray) -> Steps:
    """Sends one number to each member and receives one from each, under a tag that no other message uses."""
    places = range(group.size)
    return _swap(group, [told[at : at + 1] for at in places], [heard[at : at + 1] for at in places], group.tag(0, 1))


def exchange(group: Group, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> Steps:
    """Sends each of the other members its flat array, and receives one from each.

    Args:
        group: the members.
        outgoing: by member, of any size; the array for this member itself is not sent.
        incoming: by member, of the sizes that those members send.
    """
    sent, received = [array.view(np.uint8) for array in outgoing], [array.view(np.uint8) for array in incoming]
    longest = max((array.size for index in group.others() for array in (sent[index], received[index])), default=0)
    rounds = (
        (_part(sent, start, group.chunk), _part(received, start, group.chunk))
        for start in range(0, longest, group.chunk)
    )
    return windowed(
        rounds,
        lambda pieces: sum(piece.nbytes for piece in pieces[1]),
        lambda slot, pieces: _swap(group, *pieces, group.tag(slot, 0)),
    )


def _part(arrays: Sequence[np.ndarray], start: int, length: int) -> list[np.ndarray]:
    return [array[start : start + length] for array in arrays]


def _swap(group: Group, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray], tag: int) -> Steps:
    """Sends one array to each other member and receives one from each; empty arrays are skipped."""
    tickets = [group.receive(incoming[peer], peer, tag) for peer in group.others() if incoming[peer].size]
    tickets += [group.send(outgoing[peer], peer, tag) for peer in group.others() if outgoing[peer].size]
    yield from group.finish(tickets)


def reduce_scatter(group: Group, slices: Sequence[np.ndarray], result: np.ndarray, reduction: Reduction) -> Steps:
    """Reduces every member's slice of all members' arrays; no member's array changes.

    Args:
        group: the members.
        slices: this rank's flat contiguous array, cut into one slice per member; of equal lengths on all members.
        result: of the length of this rank's slice.
        reduction: the arithmetic.
    """
    itemsize = result.itemsize
    step = max(1, group.chunk // itemsize)
    longest = max(part.size for part in slices)
    rounds = ((_part(slices, start, step), result[start : start + step]) for start in range(0, longest, step))
    return windowed(
        rounds,
        lambda piece: piece[1].nbytes * group.size,
        lambda slot, piece: _reduce_round(group, *piece, reduction, group.tag(slot, 0)),
    )


def _reduce_round(
    group: Group, outgoing: Sequence[np.ndarray], result: np.ndarray, reduction: Reduction, tag: int
) -> Steps:
    """Reduces one piece of every slice."""
    if reduction.scales:
        outgoing = [part.copy() for part in outgoing]
        for part in outgoing:
            reduction.prepare(part)
    parts = [result if index == group.me else group.scratch.take(result) for index in range(group.size)]
    result[...] = outgoing[group.me]
    yield from _swap(group, outgoing, parts, tag)
    if result.size:
        reduction.combine(parts, result)
    for index in group.others():
        group.scratch.give(parts[index])
