"""The order in which processes see what is written in common memory, on processors that keep no order of their own.

What a fence is cannot be seen here, on x86: what is checked is that there is one wherever one is needed.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from coordd.transport.shared_memory import board, host_memory, loans
from coordd.transport.shared_memory.host_memory import Commons, FencedMeeting, Meeting
from coordd.transport.shared_memory.loans import Loans
from coordd.transport.shared_memory.ring_buffer import RING_BYTES, RingReader, RingWriter
from coordd_tools.sim.data import move
from tests.neighbours import neighbours


class Words:
    """Words of a board whose reads and writes are noted, as ``r`` and ``w`` with their place."""

    def __init__(self, words: Any, seen: list[str]) -> None:
        self.words = words
        self.seen = seen

    def __getitem__(self, at: int) -> int:
        self.seen.append(f"r{at}")
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.seen.append(f"w{at}")
        self.words[at] = value


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """What was done in which order; fences are ``|``."""
    found: list[str] = []
    for module in (board, host_memory):
        monkeypatch.setattr(module, "fence", lambda: found.append("|"))
    monkeypatch.setattr(host_memory, "_meeting", FencedMeeting)
    monkeypatch.setattr(board, "release", lambda: found.append("|"))
    return found


@pytest.fixture
def pair() -> Iterator[list[Commons]]:
    with neighbours([0, 1]) as world:
        yield world


def met(world: list[Commons], seen: list[str]) -> list[Meeting]:
    for each in world:
        for one in each.boards.values():
            if not isinstance(one.words, Words):
                one.words = Words(one.words, seen)
    found = [each.meeting(3, 1, (0, 1)) for each in world]
    assert all(meeting.enter() for meeting in found)
    seen.clear()
    return found


def test_a_reader_has_a_fence_before_the_count_and_before_what_it_speaks_of(pair, seen):
    first, second = met(pair, seen)
    stamp = pair[0].mine.slot(3)
    second.lay_open(1)
    second.hand_out(1)
    second.commons.mine.words[stamp + host_memory._VERDICT] = 1
    for look, which in ((first.all_open, host_memory._STAGED), (first.all_reduced, host_memory._REDUCED)):
        seen.clear()
        assert look(1)
        assert seen == [f"r{stamp}", "|", f"r{stamp + which}", "|"]
    seen.clear()
    assert first.words()
    assert seen == [f"r{stamp}", "|", f"r{stamp + host_memory._WORD}", "|"]


def test_a_later_stamp_and_an_earlier_one_mean_the_same_with_fences(pair, seen):
    first, second = met(pair, seen)
    second.finish()
    first.finish()
    later = pair[1].meeting(3, 2, (0, 1))
    assert later.enter()
    assert first.all_reduced(1 << 40)
    assert not later.all_open(1)


def test_a_writer_has_a_fence_before_every_word_that_others_wait_for(pair, seen):
    first, _ = met(pair, seen)
    stamp = pair[0].mine.slot(3)
    told = {
        host_memory._STAGED: lambda: first.lay_open(1),
        host_memory._REDUCED: lambda: first.hand_out(1),
        host_memory._VERDICT: lambda: first.conclude(valid=True),
    }
    for which, tell in told.items():
        seen.clear()
        tell()
        assert seen[:2] == ["|", f"w{stamp + which}"]
        assert seen[2] == "|"  # before it asks who sleeps


def test_a_block_is_listed_with_its_size_first(pair, seen):
    met(pair, seen)
    pair[0].mine.list_block(5, 1, 4096)
    size, _, descriptor = (seen.index(each) for each in seen)
    assert (size, seen[1], descriptor) == (0, "|", 2)


def test_rings_have_fences_on_both_sides(monkeypatch):
    found: list[str] = []
    monkeypatch.setattr("coordd.transport.shared_memory.ring_buffer.fence", lambda: found.append("|"))
    memory = np.zeros(RING_BYTES, np.uint8)
    writer, reader = RingWriter(memory.data), RingReader(memory.data)
    for end in (writer, reader):
        end._words = Words(end._words, found)
    assert writer.put(b"abc")
    assert found == ["r8", "|", "w0"]
    found.clear()
    assert reader.take() == b"abc"
    assert found == ["r0", "|", "|", "w8"]


def test_a_loan_is_given_and_given_back_after_what_was_done_with_it(monkeypatch):
    found: list[str] = []
    monkeypatch.setattr(loans, "release", lambda: found.append("|"))
    owner = Loans({1: 0})
    array = owner.blank(100)
    (block,) = owner._own.values()
    word = block.word
    block.word = Words(word, found)
    assert owner.lend(array) is not None
    assert found[-2:] == ["|", "w0"]
    found.clear()
    loans._give_back(block.word, os.getpid())
    assert found == ["|", "w0"]
    block.word = word
    owner.close()


def test_the_end_of_an_object_in_the_middle_of_a_fence_waits_for_nothing(monkeypatch):
    """A finalizer may run while this very thread holds the lock."""
    monkeypatch.setattr(board, "ORDERED", False)

    class Thing:
        pass

    thing = Thing()
    weakref.finalize(thing, board.release)
    with board._lock:
        del thing
        gc.collect()


@pytest.mark.parametrize("seed", range(20))
def test_the_data_plane_is_right_with_fences(monkeypatch, seed):
    monkeypatch.setattr(host_memory, "_meeting", FencedMeeting)
    for module in (board, loans):
        monkeypatch.setattr(module, "release", board.fence)
    monkeypatch.setattr(board, "ORDERED", False)
    move(seed)
