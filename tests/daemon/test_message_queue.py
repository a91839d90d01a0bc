from __future__ import annotations

import threading
import time

import pytest

from coordd.daemon.message_queue import Inbox
from coordd.daemon.wakeup import Bell

DEADLINE = 10.0
LONG = 3600.0


@pytest.fixture
def bell():
    bell = Bell()
    yield bell
    bell.close()


def test_items_wait_for_company(bell):
    inbox = Inbox(bell, window=LONG)
    inbox.put(1)
    assert inbox.take() == []
    inbox.put(2)
    assert inbox.take() == []
    assert inbox


def test_the_window_begins_with_the_first_look_and_ends_for_all(bell, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    inbox = Inbox(bell, window=1.0)
    assert inbox.take() == []
    inbox.put("first")
    assert inbox.take() == []
    now[0] = 100.9
    inbox.put("second")
    assert inbox.take() == []
    now[0] = 101.0
    assert inbox.take() == ["first", "second"]
    inbox.put("third")
    assert inbox.take() == []
    now[0] = 102.0
    assert inbox.take() == ["third"]


@pytest.mark.parametrize("wake", [True, False])
def test_what_slips_past_the_window_wakes_the_reader_if_it_is_to(bell, wake):
    inbox = Inbox(bell, window=LONG)
    inbox.slip(1, wake=wake)
    assert bell._rung is wake
    assert inbox.take() == [1]
    assert inbox.take() == []
    inbox.put(2)
    assert inbox.take() == []


def test_without_a_window_nothing_waits(bell):
    inbox = Inbox(bell, window=0.0)
    inbox.put(1)
    assert inbox.take() == [1]
    assert not inbox


def test_an_item_that_does_not_wake_the_reader_is_taken_when_its_writer_hurries(bell):
    inbox = Inbox(bell, window=LONG, limit=1)
    inbox._deep = True  # as while its reader sleeps
    inbox.put(1, 2, wake=False)
    assert not bell._rung
    inbox.hurry()
    assert bell._rung
    assert inbox.take() == [1]


def test_who_waits_ends_the_window_once(bell):
    inbox = Inbox(bell, window=LONG)
    inbox.put(1)
    inbox.hurry()
    assert inbox.take() == [1]
    inbox.put(2)
    assert inbox.take() == []


def test_the_order_is_kept_and_drain_ignores_the_window(bell):
    inbox = Inbox(bell, window=LONG)
    for item in range(5):
        inbox.put(item)
    assert inbox.drain() == [0, 1, 2, 3, 4]
    assert inbox.drain() == []


def test_sleep_does_not_outlast_the_window(bell):
    inbox = Inbox(bell, window=0.01)
    inbox.put(1)
    inbox.take()
    while not (found := inbox.take()):
        inbox.sleep(None)
    assert found == [1]


def test_sleep_does_not_begin_where_somebody_waits(bell):
    inbox = Inbox(bell, window=LONG)
    inbox.put(1)
    inbox.hurry()
    inbox.sleep(None)
    assert inbox.take() == [1]


@pytest.mark.parametrize("hurry", [False, True])
def test_nothing_is_lost_and_no_sleep_is_missed(bell, hurry):
    """Every writer goes on only after its item was taken: one missed wake-up would be a hang."""
    inbox = Inbox(bell, window=0.0)
    expected = [(number, count) for number in range(4) for count in range(200)]
    taken = []

    def write(number: int) -> None:
        for item in expected[number * 200 : (number + 1) * 200]:
            done = threading.Event()
            inbox.put((item, done))
            if hurry:
                inbox.hurry()
            assert done.wait(DEADLINE)

    writers = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(4)]
    for writer in writers:
        writer.start()
    while len(taken) < len(expected):
        inbox.sleep(DEADLINE)
        for item, done in inbox.take():
            taken.append(item)
            done.set()
    assert sorted(taken) == expected


def test_items_of_enough_weight_end_the_window_and_wake_the_reader(bell):
    inbox = Inbox(bell, window=LONG, limit=100)
    inbox.put("light", 60)
    assert inbox.take() == []
    inbox.put("heavy", 40)
    inbox.sleep(None)
    assert inbox.take() == ["light", "heavy"]
    inbox.put("light again", 60)
    assert inbox.take() == []


def test_a_look_takes_nothing():
    inbox = Inbox(Bell(), window=0.0)
    inbox.put("a")
    assert (inbox.look(), inbox.take(), inbox.look()) == (["a"], ["a"], [])
