"""Allreduce among the ranks of one host, directly in each other's memory.

A large tensor is reduced in pieces. Each rank makes its own piece readable, adds up its slice of all ranks' pieces
while it is in its caches, and writes the result to all ranks::

         rank 0's memory   rank 1's memory
         [a0][a1]          [b0][b1]        both are readable
         [s0]──────────────▶[s0]           rank 0 adds up slice 0 and writes it to both
             [s1]◀──────────────[s1]       rank 1 does so with slice 1

A tensor that already lies in shared memory needs no copies. Any other tensor passes through a small ring of places,
which stays in the caches: only the slices that other ranks add up are copied in, and only the slices that other ranks
have reduced are copied out. Tiny tensors use the slot itself, and every rank adds up all of them.

The arithmetic and its order are those of `coordd.collectives.ring`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np

from coordd.collectives.ring import Pulse, Reduction, Steps
from coordd.transport.shared_memory.board import INLINE_BYTES, LEGS
from coordd.transport.shared_memory.host_memory import Meeting

__all__ = ["RING", "Terms", "allreduce"]

RING = 4
_CACHED_BYTES = 512 << 10
_PIECES_A_STEP = 4
_CHUNKS_AT_ONCE = 8
"""Pieces are this many times larger if none passes through a ring."""
_ALIGNMENT = 16
Between = Callable[[list[np.ndarray]], Steps]
"""Exchanges a host's partial results with the other hosts before they are written out."""


class Terms(NamedTuple):
    """How an operation is carried out.

    Attributes:
        chunk: bytes of a piece.
        pulse: incremented with every piece.
        lend: returns a block of shared memory of the given number of bytes.
        between: exchanges this rank's slices with the other hosts; None if there are none.
        owners: number of members that own slices; 0 for all.
        partial: dtype of a host's partial results, if it is not the tensor's.
    """

    chunk: int
    pulse: Pulse
    lend: Callable[[int], np.ndarray]
    between: Between | None = None
    owners: int = 0
    partial: np.dtype | None = None


class _Piece(NamedTuple):
    """A part of an array: the array's index (leg), and the part's begin and end in elements."""

    leg: int
    start: int
    stop: int


def allreduce(
    meeting: Meeting,
    arrays: Sequence[np.ndarray],
    reduction: Reduction,
    terms: Terms,
    *,
    doubtful: bool = False,
) -> Generator[None, None, bool]:
    """Reduces flat contiguous arrays in place; their dtypes are equal, their sizes are equal on all members.

    Args:
        meeting: the members' meeting point, which this rank has entered.
        arrays: the arrays to reduce.
        reduction: the arithmetic.
        terms: how the operation is carried out.
        doubtful: whether a member may have entered with an invalid vote; then no data moves.

    Returns:
        Whether the arrays were reduced.
    """
    if doubtful and reduction.scales and not (yield from _assented(meeting)):
        return False
    if terms.between is None and sum(array.nbytes + _ALIGNMENT for array in arrays) <= INLINE_BYTES:
        return (yield from _at_once(meeting, arrays, reduction, terms.pulse))
    work = _Large(meeting, arrays, reduction, terms)
    while not work.done:
        for _ in range(_PIECES_A_STEP):
            moved = work.lay_open()
            if doubtful and meeting.words() is False:
                meeting.finish()
                return False
            reduced = yield from work.reduce()
            doubtful = doubtful and not reduced  # a member that has made data readable takes part
            if not (moved | reduced | work.land()) or work.done:
                break
            terms.pulse.beats += 1
        if not work.done:
            yield
    meeting.finish()
    terms.pulse.beats += 1
    return True


def _assented(meeting: Meeting) -> Generator[None, None, bool]:
    """Waits for the votes of all members; returns whether all are valid."""
    while (valid := meeting.words()) is None:
        yield
    if not valid:
        meeting.finish()
    return valid


def _at_once(
    meeting: Meeting, arrays: Sequence[np.ndarray], reduction: Reduction, pulse: Pulse
) -> Generator[None, None, bool]:
    """Every member makes all of its data readable and adds up all of it: one round, for small tensors."""
    mine = meeting.inline(meeting.commons.rank)
    spans = _spans(arrays)
    for array, (start, stop) in zip(arrays, spans, strict=True):
        reduction.prepare(array)
        mine[start:stop] = array.view(np.uint8).data
    meeting.lay_open(1)
    while not meeting.all_open(1):
        if meeting.words() is False:
            meeting.finish()
            return False
        yield
    pulse.beats += 1
    sources = [meeting.inline(rank) for rank in meeting.members]
    for array, (start, stop) in zip(arrays, spans, strict=True):
        parts = [np.frombuffer(source[start:stop], array.dtype) for source in sources]
        parts[meeting.me] = array
        if len(parts) > 2:  # the running total is kept in the first part, which is another rank's memory
            parts[0] = parts[0].copy()
        reduction.combine(parts, array)
    meeting.finish()
    return True


def _spans(arrays: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Returns where the arrays lie in bytes, one after the other, each aligned."""
    spans, start = [], 0
    for array in arrays:
        spans.append((start, start + array.nbytes))
        start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return spans


class _Large:
    """One rank's part in the reduction of large arrays."""

    def __init__(self, meeting: Meeting, arrays: Sequence[np.ndarray], reduction: Reduction, terms: Terms) -> None:
        self._meeting = meeting
        self._arrays = arrays
        self._reduction = reduction
        self._owners = terms.owners or len(meeting.members)
        self._between = terms.between
        self._partial = terms.partial
        self._step = max(self._owners, terms.chunk // arrays[0].itemsize)
        self._pieces = self._divide(self._step)
        self._settled = False
        self._cached = max(1024, _CACHED_BYTES // len(meeting.members) // arrays[0].itemsize)
        self._opened = self._reduced = self._landed = 0
        self._ring: np.ndarray | None = None
        self._resident = self._place(terms.lend)
        self._bases: dict[tuple[int, int], tuple[np.ndarray, bool]] = {}

    @property
    def done(self) -> bool:
        """Whether all results have arrived at this rank."""
        return self._landed == len(self._pieces)

    def _divide(self, step: int) -> list[_Piece]:
        """Cuts the arrays into pieces of ``step`` elements."""
        return [
            _Piece(leg, start, min(start + step, array.size))
            for leg, array in enumerate(self._arrays)
            for start in range(0, array.size, step)
        ]

    def _place(self, lend: Callable[[int], np.ndarray]) -> list[bool]:
        """Publishes where this rank's arrays lie; arrays outside shared memory pass through the ring.

        Returns:
            For each array whether it lies in shared memory.
        """
        heap = self._meeting.commons.heap
        found = [heap.locate(array) if leg < LEGS else None for leg, array in enumerate(self._arrays)]
        if None in found:
            places = min(RING, len(self._pieces))
            self._ring = lend(places * self._step * self._arrays[0].itemsize).view(self._arrays[0].dtype)
            self._meeting.place(LEGS, heap.locate(self._ring))
        for leg, place in enumerate(found[:LEGS]):
            self._meeting.place(leg, place)
        return [place is not None for place in found]

    def lay_open(self) -> bool:
        """Makes one more piece readable if there is room.

        Resident pieces that need no prescale are all made readable at once.
        """
        before = self._opened
        while self._opened < len(self._pieces):
            leg, start, stop = self._pieces[self._opened]
            if not self._resident[leg]:
                if self._opened - self._landed < RING:
                    self._lay_in_ring(self._opened)
                    self._opened += 1
                break
            self._opened += 1
            if self._reduction.scales:
                self._reduction.prepare(self._arrays[leg][start:stop])
                break
        if self._opened > before:
            self._meeting.lay_open(self._opened)
        return self._opened > before

    def _lay_in_ring(self, number: int) -> None:
        """Copies the slices of a piece that other ranks add up to the ring."""
        leg, start, stop = self._pieces[number]
        piece = self._arrays[leg][start:stop]
        self._reduction.prepare(piece)
        place = self._place_in_ring(number)
        for low, high in self._foreign(stop - start):
            place[low:high] = piece[low:high]

    def reduce(self) -> Generator[None, None, bool]:
        """Adds up this rank's slices of the pieces that are readable on all members, and writes them out.

        Returns:
            Whether there were any.
        """
        batch = 1 if self._between is None else RING
        stop = min(self._reduced + batch, len(self._pieces))
        if not self._reduced < stop <= self._opened or not self._meeting.all_open(stop):
            return False
        if not self._settled:
            self._settle()
            stop = min(stop, len(self._pieces))
        numbers = range(self._reduced, stop)
        slices = [self._add_up(number) for number in numbers]
        if self._between is not None:
            yield from self._between(slices)
            for number, result in zip(numbers, slices, strict=True):
                self._write_out(number, result)
        self._reduced = stop
        self._meeting.hand_out(stop)
        return True

    def _settle(self) -> None:
        """Makes pieces larger if all members have made all of them readable at once.

        All members come to the same result.
        """
        self._settled = True
        at_once = self._between is None and not self._reduction.scales and len(self._arrays) <= LEGS
        others = [member for member in range(len(self._meeting.members)) if member != self._meeting.me]
        if at_once and all(
            resident and self._base(member, leg)[1] for leg, resident in enumerate(self._resident) for member in others
        ):
            self._pieces = self._divide(_CHUNKS_AT_ONCE * self._step)
            self._opened = len(self._pieces)

    def _add_up(self, number: int) -> np.ndarray:
        """Adds up this rank's slice of a piece, in cache-sized parts, and returns it.

        On a single host also writes it out.
        """
        leg, start, stop = self._pieces[number]
        low, high = self._slice(stop - start, self._meeting.me)
        mine = self._arrays[leg][start:stop]
        views = [self._view(member, number) for member in range(len(self._meeting.members))]
        total = mine[low:high] if self._partial is None else np.empty(high - low, self._partial)
        for begin in range(low, high, self._cached):
            end = min(begin + self._cached, high)
            self._reduction.combine([view[begin:end] for view in views], total[begin - low : end - low])
            if self._between is None:
                self._copy(mine[begin:end], views, begin, end)
        return total

    def _write_out(self, number: int, total: np.ndarray) -> None:
        """Writes this rank's slice of a result to all members."""
        leg, start, stop = self._pieces[number]
        low, high = self._slice(stop - start, self._meeting.me)
        views = [self._view(member, number) for member in range(len(self._meeting.members))]
        mine = self._arrays[leg][start + low : start + high]
        if total.dtype != mine.dtype:
            with np.errstate(over="ignore"):  # values too large for sixteen bits become infinite, as in any sum
                mine[...] = total
        self._copy(mine, views, low, high)

    def _copy(self, result: np.ndarray, views: Sequence[np.ndarray], begin: int, end: int) -> None:
        for member, view in enumerate(views):
            if member != self._meeting.me:
                view[begin:end] = result

    def land(self) -> bool:
        """Takes over the pieces that all members have reduced; returns whether there were any."""
        before = self._landed
        while self._landed < self._reduced and self._meeting.all_reduced(self._landed + 1):
            leg, start, stop = self._pieces[self._landed]
            if not self._resident[leg]:
                place, piece = self._place_in_ring(self._landed), self._arrays[leg][start:stop]
                for low, high in self._foreign(stop - start):
                    piece[low:high] = place[low:high]
            self._landed += 1
        return self._landed > before

    def _place_in_ring(self, number: int) -> np.ndarray:
        assert self._ring is not None  # noqa: S101 - for the type checker
        at = number % RING * self._step
        return self._ring[at : at + self._step]

    def _view(self, member: int, number: int) -> np.ndarray:
        """Returns a member's memory of a piece."""
        leg, start, stop = self._pieces[number]
        if member == self._meeting.me:
            return self._arrays[leg][start:stop]
        memory, resident = self._base(member, leg)
        if not resident:
            start, stop = number % RING * self._step, number % RING * self._step + stop - start
        return memory[start:stop]

    def _base(self, member: int, leg: int) -> tuple[np.ndarray, bool]:
        """Returns another member's array, or its ring, and whether it is the array."""
        if (member, leg) not in self._bases:
            array = self._arrays[leg]
            resident = leg < LEGS and self._meeting.has_place(member, leg)
            size = array.nbytes if resident else RING * self._step * array.itemsize
            memory = self._meeting.place_of(member, leg if resident else LEGS)
            self._bases[member, leg] = memory[:size].view(array.dtype), resident
        return self._bases[member, leg]

    def _slice(self, size: int, member: int) -> tuple[int, int]:
        """Returns the part of a piece that a member adds up."""
        if member >= self._owners:
            return size, size
        return size * member // self._owners, size * (member + 1) // self._owners

    def _foreign(self, size: int) -> list[tuple[int, int]]:
        """Returns the parts of a piece that other members add up."""
        low, high = self._slice(size, self._meeting.me)
        return [(0, low), (high, size)]
