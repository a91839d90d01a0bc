"""Collectives among the ranks of one host, straight in each other's memory.

A large tensor is reduced in pieces. Each rank lays its own open to the others, adds up its slice of everybody's piece
while that is in its caches, and writes the result to everybody::

         rank 0's memory   rank 1's memory
         [a0][a1]          [b0][b1]        both lie open
         [s0]──────────────▶[s0]           rank 0 adds up slice 0 and writes it to both
             [s1]◀──────────────[s1]       rank 1 does so with slice 1

Where a tensor lies in common memory already, that is all. Another one passes through a small ring of places, which
stays in the caches: only what others need is copied there, and only what others have made is copied back. What is
tiny travels in the slot itself, and everybody adds up all of it.

The arithmetic and its order are those of `coordd.transport.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np

from coordd.transport.board import INLINE_BYTES, LEGS
from coordd.transport.collectives import Pulse, Reduction, Steps
from coordd.transport.commons import Meeting

__all__ = ["RING", "Terms", "allreduce"]

RING = 4
_CACHED_BYTES = 512 << 10
_PIECES_A_STEP = 4
_CHUNKS_AT_ONCE = 8
"""Pieces are so many times larger where none passes through a ring."""
_ALIGNMENT = 16
Between = Callable[[list[np.ndarray]], Steps]
"""What happens to a host's results before they are handed out; for more hosts than one."""


class Terms(NamedTuple):
    """How an operation is carried out.

    Attributes:
        chunk: bytes of a piece.
        pulse: beats with every piece.
        lend: gives a block of common memory of so many bytes.
        between: carries this rank's slices to the other hosts and back; None if there are none.
        owners: members that own slices; 0 for all.
        partial: the type in which a host's results go to the others, if it is not the tensor's.
    """

    chunk: int
    pulse: Pulse
    lend: Callable[[int], np.ndarray]
    between: Between | None = None
    owners: int = 0
    partial: np.dtype | None = None


class _Piece(NamedTuple):
    """A part of an array: where it begins, in elements, and where it ends."""

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
        arrays: what to reduce.
        reduction: the arithmetic.
        terms: how to go about it.
        doubtful: whether a member may have entered with an invalid word; then nothing moves.

    Returns:
        whether it has been done.
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
            doubtful = doubtful and not reduced  # whoever has laid something open takes part
            if not (moved | reduced | work.land()) or work.done:
                break
            terms.pulse.beats += 1
        if not work.done:
            yield
    meeting.finish()
    terms.pulse.beats += 1
    return True


def _assented(meeting: Meeting) -> Generator[None, None, bool]:
    """Waits for the words of all; says whether they are valid."""
    while (valid := meeting.words()) is None:
        yield
    if not valid:
        meeting.finish()
    return valid


def _at_once(
    meeting: Meeting, arrays: Sequence[np.ndarray], reduction: Reduction, pulse: Pulse
) -> Generator[None, None, bool]:
    """Everybody lays everything open and adds up all of it: one round, for what is small."""
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
        if len(parts) > 2:  # the running total is kept in the first part, which is not ours
            parts[0] = parts[0].copy()
        reduction.combine(parts, array)
    meeting.finish()
    return True


def _spans(arrays: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Where arrays lie in bytes, one after the other, each aligned."""
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
        """Whether everything has arrived here."""
        return self._landed == len(self._pieces)

    def _divide(self, step: int) -> list[_Piece]:
        """Cuts the arrays into pieces of so many elements."""
        return [
            _Piece(leg, start, min(start + step, array.size))
            for leg, array in enumerate(self._arrays)
            for start in range(0, array.size, step)
        ]

    def _place(self, lend: Callable[[int], np.ndarray]) -> list[bool]:
        """Says where this rank's arrays lie; those that do not lie in common memory pass through the ring."""
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
        """Lays one more piece open, if there is room for it; those that need no hand laid on them at once."""
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
        """Copies what others add up of a piece to where they see it."""
        leg, start, stop = self._pieces[number]
        piece = self._arrays[leg][start:stop]
        self._reduction.prepare(piece)
        place = self._place_in_ring(number)
        for low, high in self._foreign(stop - start):
            place[low:high] = piece[low:high]

    def reduce(self) -> Generator[None, None, bool]:
        """Adds up this rank's slices of what all have laid open, and hands them out; says whether there were any."""
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
        """Makes pieces larger if everybody has laid all of them open at once; all members find the same."""
        self._settled = True
        at_once = self._between is None and not self._reduction.scales and len(self._arrays) <= LEGS
        others = [member for member in range(len(self._meeting.members)) if member != self._meeting.me]
        if at_once and all(
            resident and self._base(member, leg)[1] for leg, resident in enumerate(self._resident) for member in others
        ):
            self._pieces = self._divide(_CHUNKS_AT_ONCE * self._step)
            self._opened = len(self._pieces)

    def _add_up(self, number: int) -> np.ndarray:
        """Adds up this rank's slice of a piece, in cache-sized parts, and returns it; on the only host hands it out."""
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
        """Writes this rank's slice of a result to all."""
        leg, start, stop = self._pieces[number]
        low, high = self._slice(stop - start, self._meeting.me)
        views = [self._view(member, number) for member in range(len(self._meeting.members))]
        mine = self._arrays[leg][start + low : start + high]
        if total.dtype != mine.dtype:
            with np.errstate(over="ignore"):  # what does not fit into sixteen bits is infinite, as in any sum
                mine[...] = total
        self._copy(mine, views, low, high)

    def _copy(self, result: np.ndarray, views: Sequence[np.ndarray], begin: int, end: int) -> None:
        for member, view in enumerate(views):
            if member != self._meeting.me:
                view[begin:end] = result

    def land(self) -> bool:
        """Takes over the pieces that all have handed out; says whether there were any."""
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
        """A member's memory of a piece."""
        leg, start, stop = self._pieces[number]
        if member == self._meeting.me:
            return self._arrays[leg][start:stop]
        memory, resident = self._base(member, leg)
        if not resident:
            start, stop = number % RING * self._step, number % RING * self._step + stop - start
        return memory[start:stop]

    def _base(self, member: int, leg: int) -> tuple[np.ndarray, bool]:
        """Where another member's array lies, or its ring; and whether it is the array."""
        if (member, leg) not in self._bases:
            array = self._arrays[leg]
            resident = leg < LEGS and self._meeting.has_place(member, leg)
            size = array.nbytes if resident else RING * self._step * array.itemsize
            memory = self._meeting.place_of(member, leg if resident else LEGS)
            self._bases[member, leg] = memory[:size].view(array.dtype), resident
        return self._bases[member, leg]

    def _slice(self, size: int, member: int) -> tuple[int, int]:
        """The part of a piece that a member adds up."""
        if member >= self._owners:
            return size, size
        return size * member // self._owners, size * (member + 1) // self._owners

    def _foreign(self, size: int) -> list[tuple[int, int]]:
        """The parts of a piece that others add up."""
        low, high = self._slice(size, self._meeting.me)
        return [(0, low), (high, size)]
