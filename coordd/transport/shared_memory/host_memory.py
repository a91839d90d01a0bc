"""The ranks of one host as one of them sees them: boards, memory, and meeting points of operations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from coordd.transport.shared_memory.board import BLOCKS, ORDERED, Board, Card, fence, ring_all
from coordd.transport.shared_memory.segments import RESERVE_BYTES, Heap, attach

__all__ = ["Commons", "Meeting", "Sharing", "join", "share"]

_STAMP, _STAGED, _REDUCED, _WORD, _VERDICT, _PLACES = 0, 1, 2, 3, 4, 8
_EVERYTHING = 1 << 62
_VALID, _INVALID = 1, -1


class Commons:
    """This rank's view of its host: global ranks, ascending, including this rank."""

    def __init__(self, ranks: Sequence[int], rank: int, boards: Sequence[Board]) -> None:
        """Stores the boards of all ranks of the host, in rank order."""
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
        """Returns a block of at least ``size`` bytes of shared memory, uninitialised.

        An operation that other ranks take part in must not fail on this rank alone, so there is a reserve for the case
        that file descriptors run out.

        Raises:
            OSError: the reserve is used up, too.
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
        """Takes back a block that `borrow` returned, once no rank reads it any more."""
        self._spare.setdefault(block.size, []).append(block)

    def others(self, members: tuple[int, ...]) -> tuple[tuple[memoryview, ...], tuple[Board, ...]]:
        """Returns the words and the boards of all members but this rank."""
        if members not in self._others:
            boards = tuple(self.boards[member] for member in members if member != self.rank)
            self._others[members] = tuple(board.words for board in boards), boards
        return self._others[members]

    def meeting(self, slot: int, stamp: int, members: Sequence[int]) -> Meeting:
        """Creates the meeting point of one operation.

        Args:
            slot: its slot on the boards, equal on all members; the stamps of a slot only grow.
            stamp: its number, equal on all members.
            members: global ranks of this host, ascending.
        """
        found = _meeting(self, slot, stamp, members, before=self._last.get(slot))
        self._last[slot] = found
        return found

    def block(self, rank: int, number: int) -> np.ndarray:
        """Returns a neighbour's block of memory; maps it on first use."""
        known = self._blocks[rank]
        if number not in known:
            board = self.boards[rank]
            self._blocks[rank] = known = {old: block for old, block in known.items() if board.block(old)[0] >= 0}
            descriptor, size = board.block(number)
            known[number] = attach(board.pid, descriptor, size, populate=size != RESERVE_BYTES)
        return known[number]

    def close(self) -> None:
        """Releases this rank's memory and boards; neighbours that still read keep their mappings."""
        self.heap.close()
        for board in self.boards.values():
            board.close()


class Meeting:
    """Where the members of one operation publish their progress.

    A member's progress is two counts of pieces: pieces that it has made readable, and pieces whose result it has
    written. A member with a later stamp in this slot has finished this operation.
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
        """Takes the slot once all members have finished its previous operation; returns False if they have not.

        Args:
            word: whether this rank takes part; if not, no data must move on any rank.

        Raises:
            RuntimeError: this rank has already published a later operation in the slot, so its neighbours would
                consider this one finished.
        """
        before = self._before
        if before is not None:
            if not before.over():
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
        if before is not None and before.members != self.members:
            ring_all(before.neighbours)  # one that has looked just now has seen counts of zero, and may sleep
        return True

    @property
    def neighbours(self) -> tuple[Board, ...]:
        """The boards of the other members."""
        return self._others

    def over(self) -> bool:
        """Returns whether no rank uses this operation's memory any more."""
        return self._done and self.all_reduced(_EVERYTHING)

    def finish(self) -> None:
        """Publishes that this rank has finished the operation."""
        self._done = True
        self.hand_out(_EVERYTHING)

    def lay_open(self, count: int) -> None:
        """Publishes that the first ``count`` pieces of this rank can be read."""
        fence()
        self._words[self._base + _STAGED] = count
        ring_all(self._others)

    def hand_out(self, count: int) -> None:
        """Publishes that this rank has written its part of the first ``count`` results to the others."""
        fence()
        self._words[self._base + _REDUCED] = count
        ring_all(self._others)

    def all_open(self, count: int) -> bool:
        """Returns whether all others have made at least ``count`` pieces readable."""
        for words in self._theirs:  # noqa: SIM110 - a generator costs time, and this is asked again and again
            if self._count(words, _STAGED) < count:
                return False
        return True

    def all_reduced(self, count: int) -> bool:
        """Returns whether all others have written at least ``count`` results."""
        for words in self._theirs:  # noqa: SIM110 - as above
            if self._count(words, _REDUCED) < count:
                return False
        return True

    def words(self) -> bool | None:
        """Returns the others' votes: False if any is invalid, True if all are valid, else None."""
        found = [self._count(words, _WORD) for words in self._theirs]
        if _INVALID in found:
            return False
        return True if all(found) else None

    def conclude(self, *, valid: bool) -> None:
        """Publishes the vote that all hosts have agreed on; called by the first member."""
        fence()
        self._words[self._base + _VERDICT] = _VALID if valid else _INVALID
        ring_all(self._others)

    def verdict(self) -> bool | None:
        """Returns the vote that the first member has published; None if it has not yet."""
        first = self.commons.boards[self.members[0]].words
        found = self._count(first, _VERDICT)
        return found > 0 if found else None

    def _count(self, words: memoryview, which: int) -> int:
        stamp = words[self._base]
        if stamp == self.stamp:
            return words[self._base + which]
        return _EVERYTHING if stamp > self.stamp else 0

    def inline(self, rank: int) -> memoryview:
        """Returns a member's inline bytes in the slot."""
        return self.commons.boards[rank].inline(self._slot)

    def place(self, leg: int, place: tuple[int, int] | None) -> None:
        """Publishes the block and offset of this rank's array; None if it lies outside shared memory."""
        at = self._base + _PLACES + 2 * leg
        self._words[at], self._words[at + 1] = place or (-1, 0)

    def has_place(self, member: int, leg: int) -> bool:
        """Returns whether a member's array lies in shared memory."""
        return self._place(member, leg)[0] >= 0

    def place_of(self, member: int, leg: int) -> np.ndarray:
        """Returns a member's shared memory as bytes, from the start of its array or its ring."""
        block, offset = self._place(member, leg)
        return self.commons.block(self.members[member], block)[offset:]

    def _place(self, member: int, leg: int) -> tuple[int, int]:
        words = self.commons.boards[self.members[member]].words
        at = self._base + _PLACES + 2 * leg
        return words[at], words[at + 1]


class FencedMeeting(Meeting):
    """A meeting on a processor that may reorder reads, such as ARM.

    A count is read after the stamp that it belongs to, and the data that it refers to is read after the count.
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
        hosts: a name for every rank; ranks of one name can map each other's memory and know each other's process ids.
        commons: the shared memory of this rank's host; None if any rank of the job cannot share memory.
    """

    hosts: tuple[str, ...]
    commons: Commons | None


def share(gather: Callable[[Any], list[Any]], machines: Sequence[str], rank: int, bell: int) -> Sharing:
    """Determines which ranks share memory; all ranks of the world must call it.

    Host names are not sufficient: two containers may have the same name and one kernel. So each rank puts an
    unguessable number into its memory, and its neighbours look for it there.

    Args:
        gather: exchanges one small value with all ranks.
        machines: the machine name of every rank; ranks of different machines are not tried.
        rank: this rank.
        bell: the descriptor that wakes this rank's daemon when written to.
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
    """Connects the ranks of this host when the hosts are already known; all ranks of the world must call it.

    Args:
        gather: exchanges one small value with all ranks.
        hosts: the host of every rank.
        rank: this rank.
        bell: the descriptor that wakes this rank's daemon when written to.

    Returns:
        None if any rank of the job cannot map its neighbours' memory: all ranks make the same choice.
    """
    found, commons = share(gather, hosts, rank, bell)
    if found == tuple(hosts) or commons is None:
        return commons
    commons.close()
    return None


def _hosts(machines: Sequence[str], seen: Sequence[Sequence[int] | None]) -> tuple[str, ...]:
    """Returns the host name of each rank: ranks of one machine that can all map each other's memory form a host.

    A rank without shared memory counts as being on the same host: nothing shows that it is elsewhere.
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
    """Returns whether a rank and all ranks of a group can map each other's memory."""
    sights = {other: seen[other] for other in (rank, *group)}
    return all(
        sight is None or sights[other] is None or other in sight
        for one, sight in sights.items()
        for other in sights
        if rank in (one, other)
    )


def _own_board(bell: int) -> tuple[Board, Card] | tuple[None, None]:
    """Creates this rank's board; (None, None) if the system has no such memory, or no ``/proc`` to find it."""
    if not hasattr(os, "memfd_create"):
        return None, None
    try:
        return Board.create(bell)
    except OSError:
        return None, None


def _boards_of(rank: int, machines: Sequence[str], cards: Sequence[Card | None]) -> dict[int, Board]:
    """Maps the boards of the ranks of this machine whose memory can be mapped from here."""
    found = {}
    for other, card in enumerate(cards):
        if other != rank and machines[other] == machines[rank] and card is not None:
            with contextlib.suppress(OSError):
                found[other] = Board.of(card)
    return found


def _close(boards: Iterable[Board]) -> None:
    for board in boards:
        board.close()
