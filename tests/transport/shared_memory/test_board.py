"""Boards: what neighbours read is what the owner wrote, and whoever sleeps is woken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from coordd.daemon.wakeup import Bell
from coordd.transport.shared_memory.board import BLOCKS, INLINE_BYTES, LEGS, SLOTS, Board, Card, ring_all

ROUNDS = 1500
TOO_LONG = 5.0
WORD = Board.slot(None, 3)  # any word that the protocol leaves to its users


@pytest.fixture
def bell() -> Iterator[Bell]:
    bell = Bell()
    yield bell
    bell.close()


@pytest.fixture
def pair(bell) -> Iterator[tuple[Board, Board]]:
    """A board in its own process, and as a neighbour sees it."""
    board, card = Board.create(bell.descriptor)
    seen = Board.of(card)
    yield board, seen
    seen.close()
    board.close()


def test_words_are_seen_by_neighbours(pair):
    mine, seen = pair
    mine.words[WORD] = -(1 << 62)
    assert seen.words[WORD] == -(1 << 62)
    assert not seen.has_reached(3, 1)
    mine.words[WORD] = 7
    assert [seen.has_reached(3, stamp) for stamp in (6, 7, 8)] == [True, True, False]


def test_nothing_on_a_board_overlaps(pair):
    """Every block's listing, slot and inline place holds what was written to it after all others were written."""
    mine, seen = pair
    for number in range(BLOCKS):
        mine.list_block(number, number, 10 + number)
    for slot in range(SLOTS):
        start = mine.slot(slot)
        mine.words[start : start + 8 + 2 * (LEGS + 1)] = memoryview(
            b"".join((slot * 100 + word).to_bytes(8, sys.byteorder) for word in range(8 + 2 * (LEGS + 1)))
        ).cast("q")
        mine.inline(slot)[:] = bytes([slot % 251]) * INLINE_BYTES
    mine.fall_asleep()
    assert all(seen.block(number) == (number, 10 + number) for number in range(BLOCKS))
    for slot in range(SLOTS):
        assert [seen.words[seen.slot(slot) + word] for word in (0, 7, 41)] == [slot * 100 + word for word in (0, 7, 41)]
        assert set(seen.inline(slot)) == {slot % 251}
    with pytest.raises(IndexError):
        seen.words[seen.slot(SLOTS)] = 1


def test_a_listing_is_of_one_number_only(pair):
    mine, seen = pair
    assert seen.block(5) == (-1, 0)
    mine.list_block(5 + BLOCKS, 3, 100)
    assert seen.block(5 + BLOCKS) == (3, 100)
    assert seen.block(5) == seen.block(5 + 2 * BLOCKS) == (-1, 0)
    mine.list_block(5 + BLOCKS, -1, 0)
    assert seen.block(5 + BLOCKS)[0] == -1
    mine.list_block(BLOCKS << 20, 1 << 20, 1 << 40)
    assert seen.block(BLOCKS << 20) == (1 << 20, 1 << 40)


def test_a_board_is_that_of_its_card_or_none(bell):
    board, card = Board.create(bell.descriptor)
    before = psutil.Process().num_fds()
    for wrong in (
        card._replace(token=card.token ^ 1),
        card._replace(descriptor=bell.descriptor),
        card._replace(bell=9999),
        card._replace(pid=1 << 30),
    ):
        with pytest.raises(OSError, match=r"."):
            Board.of(wrong)
    assert psutil.Process().num_fds() == before
    board.close()
    assert psutil.Process().num_fds() == before - 2


def test_two_boards_have_two_tokens(bell):
    made = [Board.create(bell.descriptor) for _ in range(2)]
    assert made[0][1].token != made[1][1].token
    for board, _ in made:
        board.close()


def rung(bell: Bell) -> bool:
    """Whether the sleep that would begin now ends at once."""
    since = time.monotonic()
    bell.sleep(0.02)
    return time.monotonic() - since < 0.01


def test_only_sleepers_are_rung(pair, bell):
    mine, seen = pair
    ring_all([seen])
    assert not rung(bell)
    mine.fall_asleep()
    ring_all([seen])
    ring_all([seen])
    assert rung(bell)
    mine.wake_up()
    ring_all([seen])
    assert not rung(bell)


def test_a_ring_that_nobody_hears_neither_blocks_nor_fails(pair, bell):
    mine, seen = pair
    mine.fall_asleep()
    for _ in range(100_000):  # more than a pipe holds
        seen.ring()
    bell.sleep(None)


RINGS_THE_DEAD = """
import os, signal
from coordd.transport.shared_memory.board import Board
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
ends = os.pipe()
board, card = Board.create(ends[1])
seen = Board.of(card)
for end in ends:
    os.close(end)
os.close(board._bell)
board.fall_asleep()
seen.ring()
"""


def test_ringing_a_rank_that_has_gone_does_not_end_this_one():
    """Not even where broken pipes end a process, as scripts of the command line like it."""
    assert subprocess.run([sys.executable, "-c", RINGS_THE_DEAD], check=False, timeout=30).returncode == 0


def play(mine: Board, bell: Bell, other: Board, *, first: bool, turn: Callable[[], None] = lambda: None) -> None:
    """Counts with another player in turns; who waits sleeps until he is rung.

    Raises:
        TimeoutError: a ring was lost.
    """
    for count in range(1, ROUNDS):
        if (count % 2 == 0) is first:
            turn()
            mine.words[WORD] = count
            ring_all([other])
            continue
        while other.words[WORD] < count:
            mine.fall_asleep()
            if other.words[WORD] < count:
                since = time.monotonic()
                bell.sleep(TOO_LONG)
                if time.monotonic() - since > TOO_LONG - 1 and other.words[WORD] >= count:
                    text = f"nobody rang in round {count}"
                    raise TimeoutError(text)
            mine.wake_up()


def test_no_ring_is_lost_between_threads():
    bells = [Bell(), Bell()]
    boards, cards = zip(*[Board.create(bell.descriptor) for bell in bells], strict=True)
    failed = []

    def body(me):
        other = Board.of(cards[1 - me])
        try:
            play(boards[me], bells[me], other, first=me == 0)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)
        other.close()

    threads = [threading.Thread(target=body, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for board in boards:
        board.close()
    assert not failed


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_no_ring_is_lost_between_processes():
    """The one that is about to sleep and the one that is about to ring meet in every order."""
    ways = [os.pipe(), os.pipe()]
    child = os.fork()
    me = 0 if child else 1
    status = 1
    try:
        bell = Bell()
        board, card = Board.create(bell.descriptor)
        os.write(ways[me][1], json.dumps(card).encode() + b"\n")
        with open(ways[1 - me][0], "rb", closefd=False) as reader:
            other = Board.of(Card(*json.loads(reader.readline())))
        play(board, bell, other, first=me == 0, turn=os.sched_yield)
        status = 0
    finally:
        if not child:
            os._exit(status)
        if status:
            os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)[1]
        for end in (*ways[0], *ways[1]):
            os.close(end)
    assert ended == 0
    assert board.words[WORD] >= ROUNDS - 2
    other.close()
    board.close()
