"""The ranks of one host, as one of them sees them: their boards, their memory, and one operation's meeting point."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordd.transport.board import BLOCKS, Board, Card, fence, ring_all
from coordd.transport.segments import Heap, attach

__all__ = ["Commons", "Meeting", "join"]

_STAMP, _STAGED, _REDUCED, _WORD, _VERDICT, _PLACES = 0, 1, 2, 3, 4, 8
_EVERYTHING = 1 << 62
_VALID, _INVALID = 1, -1


class Commons:
    """This rank's view of its host: global ranks, ascending, with this one among them."""

    def __init__(self, ranks: Sequence[int], rank: int, boards: Sequence[Board]) -> None:
        """Takes the boards of all ranks of the host, in the order of the ranks."""
        self.ranks = tuple(ranks)
        self.rank = rank
        self.boards = dict(zip(ranks, boards, strict=True))
        self.mine = self.boards[rank]
        self.heap = Heap(announce=self.mine.list_block, room=BLOCKS)
        self._blocks: dict[int, dict[int, np.ndarray]] = {rank: {} for rank in ranks}
        self._last: dict[int, Meeting] = {}
        self._spare: dict[int, list[np.ndarray]] = {}

    def borrow(self, size: int) -> np.ndarray:
        """Lends at least so many bytes of common memory, with anything in them."""
        rounded = 1 << max(size - 1, 4095).bit_length()
        spare = self._spare.get(rounded)
        return spare.pop() if spare else self.heap.allocate(rounded)

    def give_back(self, block: np.ndarray) -> None:
        """Takes back what `borrow` has lent, when nobody reads it any more."""
        self._spare.setdefault(block.size, []).append(block)

    def meeting(self, slot: int, stamp: int, members: Sequence[int]) -> Meeting:
        """Makes the meeting point of one operation.

        Args:
            slot: its place on the boards, equal on all members; stamps of a slot only grow.
            stamp: its number, equal on all members.
            members: global ranks of this host, ascending.
        """
        found = Meeting(self, slot, stamp, members, before=self._last.get(slot))
        self._last[slot] = found
        return found

    def block(self, rank: int, number: int) -> np.ndarray:
        """Maps a neighbour's block of memory, once."""
        known = self._blocks[rank]
        if number not in known:
            board = self.boards[rank]
            self._blocks[rank] = known = {old: block for old, block in known.items() if board.block(old)[0] >= 0}
            descriptor, size = board.block(number)
            known[number] = attach(board.pid, descriptor, size)
        return known[number]

    def close(self) -> None:
        """Leaves; neighbours that still read keep what they have mapped."""
        for board in self.boards.values():
            board.close()


class Meeting:
    """Where the members of one operation tell each other how far they are.

    A member's progress is two counts of pieces: those that it has laid open, and those whose result it has handed out.
    A member that is seen with a later stamp in this slot has finished this operation.
    """

    def __init__(
        self, commons: Commons, slot: int, stamp: int, members: Sequence[int], *, before: Meeting | None
    ) -> None:
        self.commons = commons
        self.stamp = stamp
        self.members = members
        self.me = members.index(commons.rank)
        self._slot = slot
        self._before = before
        self._base = commons.mine.slot(slot)
        self._words = commons.mine.words
        self._theirs = [commons.boards[rank].words for rank in members if rank != commons.rank]
        self._others = [commons.boards[rank] for rank in members if rank != commons.rank]
        self._done = False

    def enter(self, *, word: bool = True) -> bool:
        """Takes the slot, once all members have done with its former operation; says whether that is so.

        Args:
            word: whether this rank takes part; if not, nothing must move anywhere.
        """
        if self._before is not None:
            if not self._before.over():
                return False
            self._before = None
        base, words = self._base, self._words
        words[base + _STAGED] = words[base + _REDUCED] = words[base + _VERDICT] = 0
        words[base + _WORD] = _VALID if word else _INVALID
        fence()
        words[base] = self.stamp
        ring_all(self._others)
        return True

    def over(self) -> bool:
        """Says whether nobody uses this operation's memory any more."""
        return self._done and self.all_reduced(_EVERYTHING)

    def finish(self) -> None:
        """Says that this rank has done with it."""
        self._done = True
        self.hand_out(_EVERYTHING)

    def lay_open(self, count: int) -> None:
        """Tells the others that so many pieces of this rank can be read."""
        fence()
        self._words[self._base + _STAGED] = count
        ring_all(self._others)

    def hand_out(self, count: int) -> None:
        """Tells the others that this rank's part of so many results has reached them."""
        fence()
        self._words[self._base + _REDUCED] = count
        ring_all(self._others)

    def all_open(self, count: int) -> bool:
        """Says whether all others have laid so many pieces open."""
        return all(self._count(words, _STAGED) >= count for words in self._theirs)

    def all_reduced(self, count: int) -> bool:
        """Says whether all others have handed so many results out."""
        return all(self._count(words, _REDUCED) >= count for words in self._theirs)

    def words(self) -> bool | None:
        """What the others say: False if one will not take part, True if all will, None if some are yet to come."""
        found = [self._count(words, _WORD) for words in self._theirs]
        if _INVALID in found:
            return False
        return True if all(found) else None

    def conclude(self, *, valid: bool) -> None:
        """Tells the others what all hosts have agreed on; for the first member."""
        self._words[self._base + _VERDICT] = _VALID if valid else _INVALID
        ring_all(self._others)

    def verdict(self) -> bool | None:
        """What the first member has told; None if it has not yet."""
        first = self.commons.boards[self.members[0]].words
        found = self._count(first, _VERDICT)
        return found > 0 if found else None

    def _count(self, words: memoryview, which: int) -> int:
        stamp = words[self._base]
        if stamp == self.stamp:
            return words[self._base + which]
        return _EVERYTHING if stamp > self.stamp else 0

    def inline(self, rank: int) -> memoryview:
        """A member's few bytes in the slot itself."""
        return self.commons.boards[rank].inline(self._slot)

    def place(self, leg: int, place: tuple[int, int] | None) -> None:
        """Writes where this rank's array lies in common memory, as block and offset; None if it does not."""
        at = self._base + _PLACES + 2 * leg
        self._words[at], self._words[at + 1] = place or (-1, 0)

    def has_place(self, member: int, leg: int) -> bool:
        """Says whether a member's array lies in common memory."""
        return self._place(member, leg)[0] >= 0

    def place_of(self, member: int, leg: int) -> np.ndarray:
        """Returns the bytes of a member from where its array, or its ring, lies in common memory."""
        block, offset = self._place(member, leg)
        return self.commons.block(self.members[member], block)[offset:]

    def _place(self, member: int, leg: int) -> tuple[int, int]:
        words = self.commons.boards[self.members[member]].words
        at = self._base + _PLACES + 2 * leg
        return words[at], words[at + 1]


def join(gather: Callable[[Any], list[Any]], hosts: Sequence[str], rank: int, bell: int) -> Commons | None:
    """Meets the ranks of this host; all ranks of the world call it.

    Args:
        gather: exchanges one small value with all ranks.
        hosts: the host of every rank.
        rank: this one.
        bell: the descriptor whose writing wakes this rank's daemon.

    Returns:
        None if there are ranks anywhere that cannot see their neighbours' memory, for all must go the same way.
    """
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    mine, card = _own_board(bell)
    cards: list[Card | None] = gather(card)
    boards: list[Board] = []
    if mine is not None:
        with contextlib.suppress(OSError):
            boards.extend(mine if other == rank else _board_of(cards[other]) for other in neighbours)
    if all(gather(len(boards) == len(neighbours))) and mine is not None:
        return Commons(neighbours, rank, boards)
    for board in dict.fromkeys([mine, *boards]):
        if board is not None:
            board.close()
    return None


def _own_board(bell: int) -> tuple[Board, Card] | tuple[None, None]:
    """Makes this rank's board; without one where the system has no such memory, or no ``/proc`` to find it."""
    if not hasattr(os, "memfd_create"):
        return None, None
    try:
        return Board.create(bell)
    except OSError:
        return None, None


def _board_of(card: Card | None) -> Board:
    if card is None:
        text = "a neighbour has no memory to share"
        raise OSError(text)
    return Board.of(card)
