"""When a wait is too long, and how it is told."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from coordd.negotiation.stall import StallWatch, tell
from coordd.negotiation.tensor_table import Entry, TensorTable
from coordd.ops.messages import Account, Kind, Request, StallReport, Waiting


def entry(name: str = "w", *, submitted: float = 0.0, patient: bool = False) -> Entry:
    made = Entry(
        Request(Kind.ALLREDUCE, name, "float32", (1,)), np.ones(1, np.float32), SimpleNamespace(submitted=submitted)
    )
    made.patient = patient
    return made


def table(*entries: Entry) -> TensorTable:
    made = TensorTable()
    made.admit(entries)
    return made


def test_a_fixed_limit_is_the_limit():
    watch = StallWatch(2.0)
    watch.observe(entry(), 100.0)
    assert watch.limit == 2.0
    assert not watch.overdue(1.9)
    assert watch.overdue(2.0)


@pytest.mark.parametrize(("usual", "limit"), [(0.0, 5.0), (0.01, 5.0), (1.0, 20.0), (100.0, 60.0)])
def test_without_one_it_is_twenty_times_the_usual_wait_within_bounds(usual, limit):
    watch = StallWatch(None)
    for _ in range(200):
        watch.observe(entry(), usual)
    assert watch.limit == pytest.approx(limit)


def test_one_long_wait_does_not_make_the_usual():
    watch = StallWatch(None)
    watch.observe(entry(), 2.0)
    assert watch.limit == 5.0


def test_it_asks_again_after_twice_the_time():
    watch = StallWatch(1.0)
    asked = [tenths / 10 for tenths in range(100) if watch.overdue(tenths / 10)]
    assert asked == [1.0, 2.0, 4.0, 8.0]


def test_a_wait_that_ended_starts_it_over():
    watch = StallWatch(1.0)
    assert watch.overdue(6.0)
    watch.observe(entry(), 6.0)
    assert not watch.overdue(6.5)  # of another operation, while this one goes on waiting
    watch.begin_anew()
    assert watch.overdue(1.0)


def test_a_wait_that_ended_without_a_result_starts_it_over_too():
    watch = StallWatch(1.0)
    assert watch.overdue(6.0)
    assert not watch.overdue(0.5)  # something younger is the oldest now
    assert watch.overdue(1.0)


def test_what_was_submitted_first_is_the_oldest():
    watch = StallWatch(1.0)
    assert watch.oldest(table()) is None
    waiting = table(entry("a", submitted=2.0), entry("b", submitted=2.5), entry("c", submitted=3.0))
    assert watch.oldest(waiting) == 2.0
    assert watch.late(waiting, 3.5) == ["a", "b"]


def test_who_has_joined_waits_anew_after_all_that_the_others_do():
    watch = StallWatch(1.0)
    joined = table(entry("join", submitted=2.0, patient=True))
    assert (watch.oldest(joined), watch.late(joined, 3.0)) == (2.0, ["join"])
    watch.observe(entry("w", patient=True), 5.0)
    assert (watch.oldest(joined), watch.late(joined, 5.9), watch.late(joined, 6.0)) == (5.0, [], ["join"])


def test_what_comes_behind_a_join_may_have_waited_longer():
    watch = StallWatch(1.0)
    watch.observe(entry(patient=True), 5.0)
    waiting = table(entry("join", submitted=2.0, patient=True), entry("w", submitted=3.0))
    assert (watch.oldest(waiting), watch.late(waiting, 4.0)) == (3.0, ["w"])


def test_it_says_how_long_nothing_can_happen():
    watch = StallWatch(2.0)
    assert watch.remaining(0.5) == 1.5
    assert watch.remaining(3.0) == 0.0
    assert watch.overdue(3.0)
    assert watch.remaining(4.0) == 2.0
    assert watch.remaining(0.5) == 1.5


def test_a_report_groups_by_whom_is_waited_for():
    waiting = (
        Waiting("w", "allreduce", (1,)),
        Waiting("v", "broadcast", (1, 2)),
        Waiting("x", "allgather", (1,)),
        Waiting("y", "transfer"),
    )
    assert tell(StallReport(7.25, waiting, ())).splitlines() == [
        "no progress for 7.2 s, waiting for remainder of ranks:",
        "  'w' (allreduce), 'x' (allgather) waiting for rank 1",
        "  'v' (broadcast) waiting for ranks 1-2",
        "  'y' (transfer) agreed by all ranks, data still on the way",
    ]


def test_a_long_list_is_cut():
    waiting = tuple(Waiting(f"w{number}", "allreduce", (1,)) for number in range(100))
    [_, line] = tell(StallReport(5.0, waiting, ())).splitlines()
    assert line.endswith("'w5' (allreduce) and 94 more waiting for rank 1")


def test_a_report_says_what_the_others_do():
    account = Account(1, "train.py:9 in main: load()\ndata.py:3 in load: read(f)\n", "'v' at train.py:8")
    assert tell(StallReport(5.0, (Waiting("w", "allreduce", (1, 2)),), (account,), silent=(2,))).splitlines()[2:] == [
        "  rank 1 has last submitted 'v' at train.py:8; its main thread is at",
        "    train.py:9 in main: load()",
        "    data.py:3 in load: read(f)",
        "  rank 2 does not answer: the process is stopped, dead, or holds Python's lock",
    ]


def test_a_report_says_where_this_rank_has_submitted_what_waits():
    waiting = (*(Waiting(name, "allreduce", (1,)) for name in "abcd"), Waiting("e", "allreduce", (2,)))
    lines = {"a": "train.py:7", "b": "train.py:9", "c": "train.py:7", "others": "x.py:1"}
    first, second = tell(StallReport(5.0, waiting, ()), lines).splitlines()[1:]
    assert first.endswith(" waiting for rank 1; submitted here at train.py:7, train.py:9")
    assert second.endswith(" waiting for rank 2")
    many = {name: f"train.py:{number}" for number, name in enumerate("abcd")}
    assert tell(StallReport(5.0, waiting[:4], ()), many).endswith(" at train.py:0, train.py:1, train.py:2 and 1 more")


def test_several_may_be_silent():
    assert "  ranks 0, 2-3 do not answer: " in tell(StallReport(5.0, (), (), silent=(0, 2, 3)))


@pytest.mark.parametrize(("seconds", "times"), [(5.0, [5.0, 10.0, 12.0, 24.0]), (60.0, [12.0, 24.0])])
def test_what_ends_the_job_is_asked_about_then_and_not_later(seconds, times):
    watch = StallWatch(seconds, abort_seconds=12.0)
    for time in times:
        assert not watch.overdue(time - 0.1)
        assert watch.remaining(time - 0.1) == pytest.approx(0.1)
        assert watch.overdue(time)
        assert watch.intolerable(time) == (time >= 12.0)
