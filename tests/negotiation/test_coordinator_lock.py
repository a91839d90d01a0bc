"""Rank 0's side of a lock: who may break it, and which reports it has overtaken."""

from __future__ import annotations

import pytest

from coordd.negotiation.coordinator_lock import Latch
from coordd.ops.messages import Announcement, Kind, Report, Request
from tests.star import allreduce

NAMES = frozenset({"w0", "w2"})


def latch(number: int = 5) -> Latch:
    made = Latch(2)
    made.close(number, 0b101, NAMES)
    return made


@pytest.mark.parametrize(("steps", "watching"), [(0, False), (1, True), (3, True)])
def test_without_steps_nothing_is_ever_locked(steps, watching):
    assert Latch(steps).watching == watching


def test_there_is_one_lock_at_a_time():
    made = latch()
    assert made.slots == 0b101
    assert not made.observe([(1,)], [])
    assert made.slots == 0b101


def test_what_repeats_beside_a_lock_ends_it_and_has_to_come_twice_as_often_each_time():
    made, counts = latch(), []
    for _ in range(4):
        count = 0
        while made.slots:
            assert not made.observe([(1,)], [])
            count += 1
        assert made.tell() == 5
        counts.append(count)
        made.close(5, 0b101, NAMES)
    assert counts == [2, 4, 8, 16]


def test_what_was_released_beside_an_earlier_lock_does_not_count():
    made = latch()
    made.observe([(1,)], [])
    made.hear(Report(5, unlock=5))
    made.close(8, 0b101, NAMES)
    made.observe([(1,)], [])
    assert made.slots == 0b101


def test_whoever_breaks_it_ends_it_and_that_is_told_once():
    made = latch()
    made.hear(Report(5, unlock=5))
    assert (made.watching, made.slots, made.ended) == (True, 0, 5)
    assert (made.tell(), made.tell()) == (5, 0)


@pytest.mark.parametrize("report", [Report(4), Report(5), Report(5, hits=b"\x02"), Report(4, hits=b"\x01"), Report(9)])
def test_others_may_speak_of_other_things_or_not_know_yet(report):
    made = latch()
    made.hear(report)
    assert made.slots == 0b101


@pytest.mark.parametrize(
    "report", [Report(5, hits=b"\x04"), Report(7, fresh=(Announcement(allreduce("w0", members=(0, 1))),))]
)
def test_who_speaks_of_what_is_locked_though_he_knows_it_has_broken_it(report):
    made = latch()
    made.hear(report)
    assert made.ended == 5


def test_an_earlier_lock_is_broken_only_once():
    made = latch()
    made.hear(Report(5, unlock=5))
    made.tell()
    made.close(8, 0b1, NAMES)
    made.hear(Report(8, unlock=5))
    assert made.slots == 0b1


def test_what_was_written_before_the_lock_does_not_count_even_after_its_end():
    made = latch()
    for _ in range(2):
        assert (made.overtaken(4), made.overtaken(5)) == (0b101, 0)
        assert made.overtakes(allreduce("w2"), 4)
        assert not made.overtakes(allreduce("w2"), 5)
        assert not made.overtakes(allreduce("w1"), 4)
        assert made.overtakes(Request(Kind.JOIN, "join"), 4)
        assert not made.overtakes(Request(Kind.JOIN, "join"), 5)
        made.hear(Report(5, unlock=5))


def test_older_locks_are_remembered_until_all_ranks_have_seen_them():
    made = latch()
    made.hear(Report(5, unlock=5))
    made.close(8, 0b10, frozenset({"w1"}))
    assert (made.overtaken(4), made.overtaken(7), made.overtaken(8)) == (0b111, 0b10, 0)
    made.forget(7)
    assert made.overtaken(4) == 0b10
    made.forget(8)
    assert made.overtaken(4) == 0


def test_a_lock_that_was_broken_at_once_is_harder_to_make():
    made = Latch(2)
    step = [(0,)]
    made.observe(step, [])
    assert made.observe(step, [])
    made.close(2, 0b1, NAMES)
    made.hear(Report(2, unlock=2, lasted=1))
    assert [bool(made.observe(step, [])) for _ in range(4)] == [False, False, False, True]
