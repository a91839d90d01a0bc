"""The ranks of one host, as one of them sees them: their boards, their memory, and one operation's meeting point."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from coordd.transport.board import BLOCKS, ORDERED, Board, Card, fence, ring_all
from coordd.transport.segments import RESERVE_BYTES, Heap, attach

__all__ = ["Commons", "Meeting", "Sharing", "join", "share"]

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
        self._others: dict[tuple[int, ...], tuple[tuple[memoryview, ...], tuple[Board, ...]]] = {}
        self._spare: dict[int, list[np.ndarray]] = {}

    def borrow(self, size: int) -> np.ndarray:
        """Lends at least so many bytes of common memory, with anything in them.

        An operation that others take part in must not fail here alone, so there is a reserve for want of descriptors.

        Raises:
            OSError: that has come to its end, too.
        """
        rounded = 1 << max(size - 1, 4095).bit_length()
        if spare := self._spare.get(rounded):
            return spare.pop()
        try:
            return self.heap.allocate(rounded)
        except OSError as error:
            self.heap.tell(error)
            return self.heap.from_reserve(rounded)

    def give_back(self, block: np.ndarray) -> None:
        """Takes back what `borrow` has lent, when nobody reads it any more."""
        self._spare.setdefault(block.size, []).append(block)

    def others(self, members: tuple[int, ...]) -> tuple[tuple[memoryview, ...], tuple[Board, ...]]:
        """The words and the boards of all members but this rank."""
        if members not in self._others:
            boards = tuple(self.boards[member] for member in members if member != self.rank)
            self._others[members] = tuple(board.words for board in boards), boards
        return self._others[members]

    def meeting(self, slot: int, stamp: int, members: Sequence[int]) -> Meeting:
        """Makes the meeting point of one operation.

        Args:
            slot: its place on the boards, equal on all members; stamps of a slot only grow.
            stamp: its number, equal on all members.
            members: global ranks of this host, ascending.
        """
        found = _meeting(self, slot, stamp, members, before=self._last.get(slot))
        self._last[slot] = found
        return found

    def block(self, rank: int, number: int) -> np.ndarray:
        """Maps a neighbour's block of memory, once."""
        known = self._blocks[rank]
        if number not in known:
            board = self.boards[rank]
            self._blocks[rank] = known = {old: block for old, block in known.items() if board.block(old)[0] >= 0}
            descriptor, size = board.block(number)
            known[number] = attach(board.pid, descriptor, size, populate=size != RESERVE_BYTES)
        return known[number]

    def close(self) -> None:
        """Leaves; neighbours that still read keep what they have mapped."""
        self.heap.close()
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
        self._theirs, self._others = commons.others(tuple(members))
        self._done = False

    def enter(self, *, word: bool = True) -> bool:
        """Takes the slot, once all members have done with its former operation; says whether that is so.

        Args:
            word: whether this rank takes part; if not, nothing must move anywhere.

        Raises:
            RuntimeError: this rank has shown a later operation in the slot, so its neighbours would take this one for
                finished.
        """
        if self._before is not None:
            if not self._before.over():
                return False
            self._before = None
        base, words = self._base, self._words
        if words[base] >= self.stamp:
            text = f"operation {self.stamp} comes after {words[base]} in slot {self._slot}: a bug of coordd"
            raise RuntimeError(text)
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
        for words in self._theirs:  # noqa: SIM110 - a generator costs time, and this is asked again and again
            if self._count(words, _STAGED) < count:
                return False
        return True

    def all_reduced(self, count: int) -> bool:
        """Says whether all others have handed so many results out."""
        for words in self._theirs:  # noqa: SIM110 - as above
            if self._count(words, _REDUCED) < count:
                return False
        return True

    def words(self) -> bool | None:
        """What the others say: False if one will not take part, True if all will, None if some are yet to come."""
        found = [self._count(words, _WORD) for words in self._theirs]
        if _INVALID in found:
            return False
        return True if all(found) else None

    def conclude(self, *, valid: bool) -> None:
        """Tells the others what all hosts have agreed on; for the first member."""
        fence()
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


class FencedMeeting(Meeting):
    """A meeting on a processor that may read in another order than the program says, as ARM does.

    A count is read after the stamp that says whose it is, and what it speaks of is read after the count.
    """

    def _count(self, words: memoryview, which: int) -> int:
        stamp = words[self._base]
        fence()
        found = words[self._base + which] if stamp == self.stamp else _EVERYTHING if stamp > self.stamp else 0
        fence()
        return found


_meeting = Meeting if ORDERED else FencedMeeting


class Sharing(NamedTuple):
    """Which ranks share memory.

    Attributes:
        hosts: a name for every rank; those of one name see each other's memory, and know each other's process numbers.
        commons: the memory of this rank's host; None if there is a rank anywhere that has none to share.
    """

    hosts: tuple[str, ...]
    commons: Commons | None


def share(gather: Callable[[Any], list[Any]], machines: Sequence[str], rank: int, bell: int) -> Sharing:
    """Finds out who shares memory; all ranks of the world call it.

    Names prove nothing: two containers may have one name and one kernel. So each rank puts a number into its memory
    that cannot be guessed, and its neighbours look for it there.

    Args:
        gather: exchanges one small value with all ranks.
        machines: names of what ranks run on; those of different names are not tried.
        rank: this one.
        bell: the descriptor whose writing wakes this rank's daemon.
    """
    mine, card = _own_board(bell)
    boards = {} if mine is None else {rank: mine}
    try:
        cards: list[Card | None] = gather(card)
        boards |= _boards_of(rank, machines, cards) if mine is not None else {}
        seen: list[tuple[int, ...] | None] = gather(tuple(sorted(boards)) if mine is not None else None)
    except BaseException:
        _close(boards.values())
        raise
    hosts = _hosts(machines, seen)
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    if any(sight is None for sight in seen):
        _close(boards.values())
        return Sharing(hosts, None)
    _close(board for other, board in boards.items() if other not in neighbours)
    commons = Commons(neighbours, rank, [boards[other] for other in neighbours])
    commons.heap.lay_by()
    return Sharing(hosts, commons)


def join(gather: Callable[[Any], list[Any]], hosts: Sequence[str], rank: int, bell: int) -> Commons | None:
    """Meets the ranks of this host, where it is known already which those are; all ranks of the world call it.

    Args:
        gather: exchanges one small value with all ranks.
        hosts: the host of every rank.
        rank: this one.
        bell: the descriptor whose writing wakes this rank's daemon.

    Returns:
        None if there are ranks anywhere that cannot see their neighbours' memory, for all must go the same way.
    """
    found, commons = share(gather, hosts, rank, bell)
    if found == tuple(hosts) or commons is None:
        return commons
    commons.close()
    return None


def _hosts(machines: Sequence[str], seen: Sequence[Sequence[int] | None]) -> tuple[str, ...]:
    """Names the host of each rank, given whom it sees: those of one machine that all see each other are together.

    Where a rank has no memory to show, nothing says that it is elsewhere.
    """
    together: dict[str, list[list[int]]] = {}
    hosts = []
    for rank, machine in enumerate(machines):
        groups = together.setdefault(machine, [])
        place = next((place for place, group in enumerate(groups) if _mutual(rank, group, seen)), len(groups))
        if place == len(groups):
            groups.append([])
        groups[place].append(rank)
        hosts.append(f"{machine}/{place + 1}" if place else machine)
    return tuple(hosts)


def _mutual(rank: int, group: Sequence[int], seen: Sequence[Sequence[int] | None]) -> bool:
    """Whether a rank and all ranks of a group see each other."""
    sights = {other: seen[other] for other in (rank, *group)}
    return all(
        sight is None or sights[other] is None or other in sight
        for one, sight in sights.items()
        for other in sights
        if rank in (one, other)
    )


def _own_board(bell: int) -> tuple[Board, Card] | tuple[None, None]:
    """Makes this rank's board; without one where the system has no such memory, or no ``/proc`` to find it."""
    if not hasattr(os, "memfd_create"):
        return None, None
    try:
        return Board.create(bell)
    except OSError:
        return None, None


def _boards_of(rank: int, machines: Sequence[str], cards: Sequence[Card | None]) -> dict[int, Board]:
    """Maps the boards of those ranks of this machine whose memory can be seen from here."""
    found = {}
    for other, card in enumerate(cards):
        if other != rank and machines[other] == machines[rank] and card is not None:
            with contextlib.suppress(OSError):
                found[other] = Board.of(card)
    return found


def _close(boards: Iterable[Board]) -> None:
    for board in boards:
        board.close()
