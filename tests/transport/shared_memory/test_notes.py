"""Notes between the ranks of a host: each way its own, in order, and who sleeps is woken."""

from __future__ import annotations

import time

import pytest

from coordd.transport.shared_memory.notes import Notes
from coordd.transport.shared_memory.ring_buffer import RING_BYTES, RingError
from tests.neighbours import lacking, notes


@pytest.fixture
def three():
    with notes(3) as found:
        yield found


def test_each_finds_what_the_others_have_left_in_their_order(three):
    for sender, mine in enumerate(three):
        for number in range(5):
            for other in {0, 1, 2} - {sender}:
                assert mine.put(other, bytes([sender, number]))
    for receiver, mine in enumerate(three):
        assert mine.news
        found = list(mine.take())
        for sender in {0, 1, 2} - {receiver}:
            assert [note[1] for note in found if note[0] == sender] == list(range(5))
        assert len(found) == 10
        assert not mine.news


def test_nobody_is_a_neighbour_of_itself_or_of_a_rank_elsewhere(three):
    assert [[rank in mine for rank in range(4)] for mine in three] == [
        [False, True, True, False],
        [True, False, True, False],
        [True, True, False, False],
    ]
    assert 0 not in Notes()
    assert list(Notes().take()) == []
    assert not Notes().news


def test_where_there_is_no_room_nothing_is_left(three):
    note = bytes(RING_BYTES // 3)
    assert [three[0].put(1, note) for _ in range(4)] == [True, True, False, False]
    assert three[2].put(1, note)
    assert list(three[1].take()) == [note] * 3
    assert three[0].put(1, note)


def test_a_note_wakes_who_sleeps(three):
    board = three[1]._boards[1]
    bell = three[0]._boards[1]._bell
    board.fall_asleep(data=False)
    since = time.monotonic()
    assert three[0].put(1, b"up")
    with open(bell, "rb", buffering=0, closefd=False) as heard:
        assert heard.read(1) == b"!"
    board.wake_up()
    assert three[0].put(1, b"again")
    assert time.monotonic() - since < 10


def test_what_nobody_has_written_is_an_error(three):
    three[0]._rings[1][0]._words[0] = 1 << 40
    with pytest.raises(RingError):
        list(three[1].take())


def test_none_has_any_if_one_has_no_memory_for_them(monkeypatch):
    lacking(monkeypatch)
    with notes(3) as found:
        assert found == [None] * 3
