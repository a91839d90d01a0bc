from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.monitoring.status.probe_result import Life
from coordd.monitoring.status.report import Operation, Plan
from coordd.monitoring.status.view import duration, missing, plan_words, rows, size_words, verdict
from tests.monitoring.status.made import HERE, operation, seen, standing, survey

ranks = st.integers(0, 5)
worlds = st.dictionaries(ranks, st.booleans())  # by rank that has answered, whether it has the operation


def stopped(rank):
    return seen(rank, host=HERE, pid=100 + rank, life=Life.STOPPED)


@given(worlds, st.sets(ranks, min_size=1))
def test_whoever_is_missing_has_not_got_it_and_nobody_else_does_while_somebody_is_known_to(world, members):
    has = {rank: standing(rank, *([operation("w")] if got else [])) for rank, got in world.items()}
    late = missing(operation("w", members=tuple(sorted(members))), has, 6)
    assert set(late) <= members
    assert list(late) == sorted(set(late))
    assert not any(world.get(rank, False) for rank in late)
    known = {rank for rank in members if rank in world and not world[rank]}
    assert set(late) == (known or members - world.keys())


def test_a_rank_that_knows_better_is_believed():
    has = {0: standing(0, operation("w")), 1: standing(1)}
    assert missing(operation("w", stage="agreed", missing=(1,)), has, 2) == ()
    assert missing(operation("w", missing=(0,)), has, 2) == (0,)


def test_a_rank_that_was_stopped_while_its_data_moved_is_named():
    moving = operation("w", stage="agreed", missing=(), seconds=9)
    told = survey(standing(0, moving, waits=True), stopped(1))
    assert [row.waits_for for row in rows(told)] == [(1,), ()]
    assert verdict(told) == [
        "Rank 0 has waited for rank 1 for 9.0 s.",
        f"Rank 1: stopped; `kill -CONT 101` on {HERE} lets it go on.",
    ]


def test_nobody_waits_for_who_has_joined_and_he_waits_for_nobody():
    join = Operation("join", "join", 90.0)
    told = survey(standing(0, operation("w"), waits=True), standing(1, join, waits=True), standing(2))
    assert [row.waits_for for row in rows(told)] == [(2,), (), ()]
    assert verdict(told)[0] == "Rank 0 has waited for rank 2 for 2.5 s."


def test_who_does_not_tell_of_everything_is_not_accused():
    assert missing(operation("w"), {0: standing(0, operation("w")), 1: standing(1, more=5)}, 2) == ()


def test_a_job_in_which_nobody_waits_for_long_needs_no_words():
    told = survey(standing(0, operation("w", seconds=0.2), waits=True), standing(1))
    assert verdict(told) == []
    assert [row.trouble for row in rows(told)] == [False, False]


def test_a_rank_that_computes_is_named_with_its_line():
    told = survey(standing(0, operation("w"), operation("v"), waits=True), standing(1))
    waiting, busy = rows(told)
    assert waiting.state == "waits for 'w' (allreduce) and 1 more for 2.5 s: rank 1 has not submitted it"
    assert (waiting.waits_for, waiting.trouble) == ((1,), True)
    assert waiting.last == "'w' at train.py:31, 2.5 s ago"
    assert (busy.state, busy.trouble) == ("computing", False)
    assert verdict(told) == [
        "Rank 0 has waited for rank 1 for 2.5 s.",
        "Rank 1: computing, at train.py:31 in main: loss.backward().",
    ]


def test_the_operation_that_somebody_is_late_for_is_told_not_one_whose_data_moves():
    told = survey(standing(0, operation("w", stage="agreed", seconds=9), operation("v"), waits=True), standing(1))
    assert rows(told)[0].state == "waits for 'v' (allreduce) and 1 more for 9.0 s: rank 1 has not submitted it"


def test_ranks_that_wait_for_the_same_share_a_sentence():
    told = survey(*(standing(rank, operation("w"), waits=True, size=4) for rank in range(3)), stopped(3))
    assert verdict(told) == [
        "Ranks 0-2 have waited for rank 3 for 2.5 s.",
        "Rank 3: stopped; `kill -CONT 103` on node1 lets it go on.",
    ]


def test_ranks_that_wait_for_each_other_are_told_each():
    told = survey(standing(0, operation("a"), waits=True), standing(1, operation("b"), waits=True))
    assert verdict(told) == ["Rank 0 has waited for rank 1 for 2.5 s.", "Rank 1 has waited for rank 0 for 2.5 s."]


def test_a_stopped_rank_is_told_even_if_nobody_waits_yet():
    assert verdict(survey(standing(0), stopped(1))) == ["Rank 1: stopped; `kill -CONT 101` on node1 lets it go on."]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"pid": 7, "life": Life.DEAD}, "dead"),
        ({"pid": 7, "life": Life.TRACED}, "stopped by a debugger"),
        ({}, "not seen: it has not called init(), has ended, or runs on another host"),
        ({"pid": 7, "reason": "does not answer"}, "does not answer"),
        (
            {"pid": 7, "life": Life.RUNNING, "cores": 0.98, "reason": "does not answer"},
            "does not answer (running, 98% of a core): native code may hold Python's lock",
        ),
    ],
)
def test_a_rank_that_tells_nothing_is_described_from_outside(fields, state):
    row = rows(survey(standing(0), seen(1, **fields)))[1]
    assert (row.state, row.trouble) == (state, True)


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (standing(0, phase="failed", failure="rank 1 died"), "the job has failed: rank 1 died"),
        (standing(0, phase="starting"), "starting for 20.0 s: rank 1 has not come"),
        (standing(0, phase="leaving"), "leaving, with rank 1 still there"),
        (standing(0, waits=True), "in coordd_torch.optimizer.synchronize()"),
        (
            standing(0, operation("w", stage="agreed"), waits=True),
            (
                "waits for 'w' (allreduce) for 2.5 s: "
                "all ranks have it, the data is on the way, and rank 1 does not answer"
            ),
        ),
        (
            standing(0, operation("w", stage="held", missing=())),
            "computing; 'w' (allreduce) under way for 2.5 s: rank 1 has not submitted it",
        ),
        (
            standing(0, Operation("recv", "x", 3.0, stage="matched", missing=(1,)), waits=True),
            "waits for 'x' (recv) for 3.0 s: from rank 1",
        ),
        (
            standing(0, Operation("send", "x", 3.0, stage="matched", missing=(1,))),
            "computing; 'x' (send) under way for 3.0 s: to rank 1",
        ),
        (standing(0, Operation("join", "join", 90.0), waits=True), "joined 1 min 30 s ago"),
    ],
)
def test_each_state_has_its_words(told, state):
    assert rows(survey(told, seen(1)))[0].state == state


def test_where_nobody_is_missing_at_the_start_nobody_is_named():
    found = rows(survey(standing(0, phase="starting"), standing(1, phase="starting")))
    assert [row.state for row in found] == ["starting for 20.0 s: all ranks are there, and connect"] * 2
    assert [row.waits_for for row in found] == [(), ()]


def test_leaving_names_only_those_who_stay():
    told = survey(standing(0, phase="leaving"), standing(1), standing(2, phase="leaving"))
    leaving = "leaving, with rank 1 still there"
    assert [row.state for row in rows(told)] == [leaving, "computing", leaving]


def test_a_rank_that_comes_late_as_a_rule_is_that_much_behind():
    told = survey(standing(0, lead=0.5), standing(1, lead=0.125), seen(2), standing(3))
    assert [row.behind for row in rows(told)] == [0.0, 0.375, 0.0, 0.0]


def test_plans_are_written():
    assert plan_words(Plan()) == "negotiating; no plan yet"
    assert plan_words(Plan(seen=1200)) == "negotiating; plan 1,200 was the last"
    locked = Plan(seen=12, lock=12, steps=1000, buckets=1, tensors=3)
    assert plan_words(locked) == "locked since plan 12: 3 tensors in 1 bucket, 1,000 steps"


@given(st.floats(0, 1e9))
def test_durations_say_about_what_they_are(seconds):
    numbers = [float(number.replace(",", "")) for number in re.findall(r"[\d.,]+", duration(seconds))]
    units = {"s": [1.0], "min s": [60.0, 1.0], "h min": [3600.0, 60.0]}[
        " ".join(re.findall("[a-z]+", duration(seconds)))
    ]
    total = sum(number * unit for number, unit in zip(numbers, units, strict=True))
    assert abs(total - seconds) <= 0.51 * (units[-1] if len(units) > 1 else 0.1) + 60 * (units[0] == 3600.0)


@given(st.integers(0, 1 << 55))
def test_sizes_say_about_what_they_are(count):
    number, unit = size_words(count).split()
    factor = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(float(number) * factor - count) <= 0.051 * factor
