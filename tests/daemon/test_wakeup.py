from __future__ import annotations

import os
import threading

import pytest

from coordd.daemon.wakeup import Bell

DEADLINE = 10.0


@pytest.fixture
def bell():
    bell = Bell()
    yield bell
    bell.close()


def sleeps(bell: Bell, seconds: float | None) -> threading.Thread:
    thread = threading.Thread(target=bell.sleep, args=(seconds,), daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(DEADLINE)
    return not thread.is_alive()


@pytest.mark.parametrize("seconds", [None, 60.0, 0.001])
def test_a_ring_before_the_sleep_ends_it_at_once(bell, seconds):
    bell.ring()
    assert ended(sleeps(bell, seconds))


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_ring_wakes_the_sleeper(bell, seconds):
    thread = sleeps(bell, seconds)
    bell.ring()
    assert ended(thread)


def test_many_rings_are_one(bell):
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()
    bell.sleep(None)
    thread = sleeps(bell, None)
    thread.join(0.02)
    assert thread.is_alive()
    bell.ring()
    assert ended(thread)


def test_a_short_sleep_ends_by_itself(bell):
    assert ended(sleeps(bell, 0.0))
    assert ended(sleeps(bell, 0.001))
    assert ended(sleeps(bell, 0.02))


@pytest.mark.parametrize("seconds", [None, 0.004])
def test_a_watched_descriptor_wakes_the_sleeper(bell, seconds):
    read, write = os.pipe()
    try:
        bell.watch([read])
        os.write(write, b"x")
        assert ended(sleeps(bell, seconds))
    finally:
        os.close(read)
        os.close(write)


def test_no_ring_is_lost_between_many_ringers(bell):
    """Each of them waits until its ring has been heard, so one lost ring would be a hang."""
    heard = 0
    ringers = [threading.Thread(target=lambda: [ring_and_wait() for _ in range(200)], daemon=True) for _ in range(4)]
    asked, answered = [0], threading.Condition()

    def ring_and_wait() -> None:
        with answered:
            asked[0] += 1
            mine = asked[0]
            bell.ring()
            assert answered.wait_for(lambda: heard >= mine, DEADLINE)

    for ringer in ringers:
        ringer.start()
    while heard < 800:
        bell.sleep(DEADLINE)
        with answered:
            heard = asked[0]
            answered.notify_all()
    assert all(ended(ringer) for ringer in ringers)


def test_a_late_ring_writes_into_nobody_elses_file(tmp_path):
    bell = Bell()
    bell.close()
    with (tmp_path / "other").open("w") as other:
        bell._rung = False  # a ring that had looked before the bell was closed
        bell.ring()
        assert os.fstat(other.fileno()).st_size == 0


def test_the_descriptors_are_freed_with_the_last_reference():
    bell = Bell()
    read = bell._read
    del bell
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


def test_a_ring_while_the_sleeper_is_awake_writes_nothing_and_is_not_lost(bell, monkeypatch):
    written = []
    monkeypatch.setattr(os, "write", lambda _, text: written.append(text))
    bell.ring()
    assert not written
    assert ended(sleeps(bell, None))
