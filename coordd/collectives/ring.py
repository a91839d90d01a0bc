"""Collectives built from point-to-point messages, as generators that the daemon advances.

Invariant: element k of a reduction is combined in rank order, ``((x0 + x1) + x2) + …``, wherever it lies in any bucket.
So results are bitwise equal on all ranks, from run to run, and however tensors were fused.

The algorithm is direct exchange. A piece of a tensor is cut into one slice per member; every member sends slice i to
member i, member i combines the slices it receives and sends the result to all members::

        member 0   member 1                 member 0   member 1
        [a0][a1]   [b0][b1]   ── slices ─▶  [a0+b0]    [a1+b1]   ── results ─▶   both have [a0+b0][a1+b1]

Each member moves 2 (n-1)/n of the tensor, the minimum possible. Sixteen-bit floats are sent as such and added in fp32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from coordd.ops.messages import ReduceOp
from coordd.transport.protocol import Lane, Ticket

__all__ = ["Group", "Pulse", "Reduction", "Scratch", "Steps", "allgather", "allreduce", "broadcast", "windowed"]

Piece = TypeVar("Piece")
Steps = Generator[None, None, None]
"""Each ``yield`` means: not complete yet."""

_SLOTS = 8
_WINDOW_BYTES = 1 << 20
_PHASES = 2
_ONE_ROUND_BYTES = 64 << 10
_UFUNCS: dict[ReduceOp, Callable[..., np.ndarray]] = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.AVERAGE_PRESENT: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


class Pulse:
    """Counts completed transfers, so that the driver of operations sees progress."""

    __slots__ = ("beats",)

    def __init__(self) -> None:
        self.beats = 0


class Scratch:
    """Buffers for received data that is not combined yet; reused, because fresh memory costs page faults."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, like: np.ndarray) -> np.ndarray:
        """Returns a flat array of the same size and dtype, uninitialised."""
        free = self._free.get(_rounded(like.nbytes))
        block = free.pop() if free else np.empty(_rounded(like.nbytes), np.uint8)
        return block[: like.nbytes].view(like.dtype)

    def give(self, array: np.ndarray) -> None:
        """Takes back an array that `take` returned, once no message into it is in flight."""
        block = array if array.base is None else array.base
        self._free.setdefault(block.nbytes, []).append(block.view(np.uint8))


class Group:
    """The members of one operation, on a lane, with tags that no other operation in flight uses."""

    tags_per_operation = _SLOTS * _PHASES

    def __init__(  # noqa: PLR0913 - a record
        self,
        lane: Lane,
        members: Sequence[int],
        rank: int,
        *,
        tag: int,
        chunk: int,
        pulse: Pulse,
        scratch: Scratch | None = None,
    ) -> None:
        """Describes one operation.

        Args:
            lane: the lane of its messages.
            members: global ranks, ascending.
            rank: this rank.
            tag: the first of its `tags_per_operation` + 1 tags; equal on all members.
            chunk: bytes of a piece of a large tensor.
            pulse: incremented after every round.
            scratch: buffers shared with other operations.
        """
        self.scratch = scratch or Scratch()
        self.pulse = pulse
        self.lane = lane
        self.members = members
        self.me = members.index(rank)
        self.chunk = chunk
        self._tag = tag

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def tag(self, slot: int, phase: int) -> int:
        """Returns the tag of one phase of the piece in a slot of the window."""
        return self._tag + slot * _PHASES + phase

    @property
    def word_tag(self) -> int:
        """Tag of the members' votes on whether the operation may begin; used by locked operations only."""
        return self._tag + self.tags_per_operation

    def others(self) -> Iterator[int]:
        """Returns the indices of the other members, starting after this one.

        Otherwise all members would send to the first one at once.
        """
        return ((self.me + step) % self.size for step in range(1, self.size))

    def send(self, array: np.ndarray, to: int, tag: int) -> Ticket:
        """Starts a send to a member, by index."""
        return self.lane.isend(array, self.members[to], tag)

    def receive(self, array: np.ndarray, source: int, tag: int) -> Ticket:
        """Starts a receive from a member, by index."""
        return self.lane.irecv(array, self.members[source], tag)

    def finish(self, tickets: Sequence[Ticket]) -> Steps:
        """Waits until the given messages are complete."""
        while not self.lane.done(tickets):
            yield
        self.pulse.beats += 1


class Reduction:
    """The arithmetic of one reduction: in the tensor's own dtype, or in fp32 for sixteen-bit floats.

    Integers are added in their own dtype. Their prescale and postscale factors are applied in float64, and their
    average is divided exactly; results are truncated toward zero.
    """

    def __init__(
        self, op: ReduceOp, dtype: np.dtype, *, prescale: float = 1.0, postscale: float = 1.0, count: int = 0
    ) -> None:
        """Describes the reduction; ``count`` is the divisor of an average, by default the number of parts."""
        self._average = op.averages
        self._count = count
        self._combine = _UFUNCS[op]
        self._prescale = prescale
        self._postscale = postscale
        self._in_place = dtype.kind != "c"  # NumPy rounds in-place multiplication of complex numbers differently
        self._narrow = _is_narrow(dtype)
        self._whole = dtype.kind in "iu"

    @property
    def sums(self) -> np.dtype | None:
        """The accumulation dtype, if it is not the tensor's own; else None."""
        return np.dtype(np.float32) if self._narrow else None

    @property
    def scales(self) -> bool:
        """Whether `prepare` changes anything."""
        return self._prescale != 1.0

    def prepare(self, piece: np.ndarray) -> None:
        """Applies the prescale factor in place."""
        if self._prescale == 1.0:
            return
        if self._narrow:  # otherwise the factor itself would be rounded to sixteen bits
            with np.errstate(over="ignore"):
                piece[...] = piece.astype(np.float32) * np.float32(self._prescale)
        else:
            np.multiply(piece, self._prescale, out=piece, casting="unsafe")

    def combine(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Combines the members' slices in rank order, then averages and applies the postscale factor.

        Args:
            parts: one slice per member; they may be overwritten.
            out: receives the result; it may be one of the parts.
        """
        total = self._total([part.astype(np.float32) for part in parts] if self._narrow else parts, out)
        count = (self._count or len(parts)) if self._average else 1
        if self._whole:
            _scale_integers(total, self._postscale, count)
        elif self._average:
            if count & (count - 1):
                np.divide(total, count, out=total)
            else:  # the same result, several times faster
                np.multiply(total, 1.0 / count, out=total)
        if self._postscale != 1.0 and not self._whole:
            np.multiply(total, self._postscale, out=total)
        if total is not out:
            with np.errstate(over="ignore"):  # values too large for sixteen bits become infinite, as in any sum
                out[...] = total

    def _total(self, parts: Sequence[np.ndarray], out: np.ndarray) -> np.ndarray:
        total = parts[0]
        for index, part in enumerate(parts[1:], start=2):
            # Until the last step the running total is kept in the first part: ``out`` may be a part that is not
            # combined yet.
            target = out if index == len(parts) and not self._narrow else total
            total = self._combine(total, part, out=target if self._in_place else None)
        return total


def _scale_integers(total: np.ndarray, factor: float, count: int) -> None:
    """Multiplies integers by a factor in float64, divides them by a count, and truncates toward zero, in place."""
    if factor != 1.0:
        np.divide(total * factor, count, out=total, casting="unsafe")
    elif count != 1:
        wide = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)  # a small dtype may not hold the count
        quotient, rest = np.divmod(wide, count)
        quotient += (rest != 0) & (wide < 0)  # `divmod` rounds down
        total[...] = quotient


@functools.cache
def _is_narrow(dtype: np.dtype) -> bool:
    return dtype.name in {"float16", "bfloat16"}


def allreduce(group: Group, arrays: Sequence[np.ndarray], reduction: Reduction) -> Steps:
    """Reduces flat contiguous arrays in place; their dtypes are equal, their sizes are equal on all members."""
    return windowed(
        (piece for array in arrays for piece in _pieces(array, group.chunk)),
        _size,
        lambda slot, piece: _reduce_piece(group, slot, piece, reduction),
    )


def broadcast(group: Group, array: np.ndarray, root: int) -> Steps:
    """Copies the array of the member with index ``root`` into every member's flat contiguous array of the same size."""
    pieces = _pieces(array, group.chunk)
    return windowed(pieces, _size, lambda slot, piece: _broadcast_piece(group, slot, piece, root))


def allgather(group: Group, blocks: Sequence[np.ndarray]) -> Steps:
    """Fills the other members' flat contiguous blocks with their data; blocks may differ in size."""
    longest = max(block.nbytes for block in blocks)
    rounds = range(0, max(longest, 1), group.chunk)
    cuts = ([_cut(block, start, group.chunk) for block in blocks] for start in rounds)
    return windowed(cuts, lambda cut: sum(map(_size, cut)), lambda slot, cut: _spread(group, cut, group.tag(slot, 0)))


def _size(array: np.ndarray) -> int:
    return array.nbytes


def windowed(pieces: Iterable[Piece], size: Callable[[Piece], int], work: Callable[[int, Piece], Steps]) -> Steps:
    """Processes several pieces concurrently, one per slot, so that some are in flight while others are combined.

    A slot is reused in the order of the pieces, so a slot's messages match on all members. The data in flight is
    limited to `_WINDOW_BYTES`, which fits into a core's cache, because received data is combined fastest from there.
    """
    source = enumerate(pieces)
    running: dict[int, tuple[Steps, int]] = {}
    under_way = 0
    waiting = next(source, None)
    while running or waiting is not None:
        while waiting is not None and (slot := waiting[0] % _SLOTS) not in running:
            weight = size(waiting[1])
            if running and under_way + weight > _WINDOW_BYTES:
                break
            running[slot] = (work(slot, waiting[1]), weight)
            under_way += weight
            waiting = next(source, None)
        for slot in [slot for slot, (steps, _) in running.items() if next(steps, _DONE) is _DONE]:
            under_way -= running.pop(slot)[1]
        if running:
            yield


_DONE = object()


def _reduce_piece(group: Group, slot: int, piece: np.ndarray, reduction: Reduction) -> Steps:
    reduction.prepare(piece)
    if group.size == 1:
        reduction.combine([piece], piece)
    elif piece.nbytes * (group.size - 1) <= _ONE_ROUND_BYTES or piece.size < group.size:
        yield from _reduce_at_once(group, slot, piece, reduction)
    else:
        yield from _reduce_slices(group, slot, piece, reduction)


def _reduce_at_once(group: Group, slot: int, piece: np.ndarray, reduction: Reduction) -> Steps:
    """One round: every member sends its whole piece to all members. Fewer steps, for small pieces."""
    parts = _parts(group, piece)
    yield from _spread(group, parts, group.tag(slot, 0))
    reduction.combine(parts, piece)
    _give_back(group, parts)


def _reduce_slices(group: Group, slot: int, piece: np.ndarray, reduction: Reduction) -> Steps:
    """Two rounds: slices to their owners, then results to all members."""
    slices = _slices(piece, group.size)
    mine = slices[group.me]
    parts = _parts(group, mine)
    tag = group.tag(slot, 0)
    receives = [group.receive(parts[peer], peer, tag) for peer in group.others()]
    sends = [group.send(slices[peer], peer, tag) for peer in group.others()]
    yield from group.finish(receives)
    reduction.combine(parts, mine)
    _give_back(group, parts)
    yield from group.finish(sends)  # the others' results may overwrite the sent data only after the sends are complete
    yield from _spread(group, slices, group.tag(slot, 1))


def _parts(group: Group, mine: np.ndarray) -> list[np.ndarray]:
    """Returns this member's part, and buffers for the others' parts."""
    return [mine if index == group.me else group.scratch.take(mine) for index in range(group.size)]


def _give_back(group: Group, parts: Sequence[np.ndarray]) -> None:
    for index in group.others():
        group.scratch.give(parts[index])


def _rounded(size: int) -> int:
    """Returns the next power of two, so that blocks can be reused."""
    return 1 << max(size - 1, 1).bit_length()


def _broadcast_piece(group: Group, slot: int, piece: np.ndarray, root: int) -> Steps:
    """The root sends each member its slice, then all members exchange slices; small pieces are sent whole."""
    if group.size == 1:
        return
    whole = piece.nbytes <= _ONE_ROUND_BYTES or piece.size < group.size
    slices = _slices(piece, group.size)
    tag = group.tag(slot, 0)
    if group.me == root:
        yield from group.finish([group.send(piece if whole else slices[peer], peer, tag) for peer in group.others()])
    else:
        yield from group.finish([group.receive(piece if whole else slices[group.me], root, tag)])
    if not whole:
        yield from _spread(group, slices, group.tag(slot, 1))


def _spread(group: Group, blocks: Sequence[np.ndarray], tag: int) -> Steps:
    """Every member sends its own block to all members; empty blocks are not sent."""
    tickets = [group.receive(blocks[peer], peer, tag) for peer in group.others() if blocks[peer].size]
    mine = blocks[group.me]
    if mine.size:
        tickets += [group.send(mine, peer, tag) for peer in group.others()]
    yield from group.finish(tickets)


def _pieces(array: np.ndarray, chunk: int) -> Iterator[np.ndarray]:
    step = max(1, chunk // array.itemsize)
    for start in range(0, array.size, step):
        yield array[start : start + step]


def _slices(piece: np.ndarray, count: int) -> list[np.ndarray]:
    """Cuts a piece into consecutive slices of nearly equal size."""
    bounds = [piece.size * index // count for index in range(count + 1)]
    return [piece[start:stop] for start, stop in itertools.pairwise(bounds)]


def _cut(block: np.ndarray, start: int, length: int) -> np.ndarray:
    """Returns part of a block as bytes; ``start`` and ``length`` are in bytes."""
    return block.view(np.uint8)[start : start + length]
