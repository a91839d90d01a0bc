from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.monitoring.timeline.journal import Journal, Operation, Wait
from coordd.monitoring.timeline.steps import anchor, steps


def operation(name, come, *, nbytes=1000, key=""):
    return Operation(key or f"{name}@{come}", "ALLREDUCE", (name,), nbytes, come, come, come, come + 0.5)


def journal(operations, waits=()):
    found = Journal(0, ())
    found.operations = sorted(operations, key=lambda one: one.come)
    found.waits = [Wait(*wait) for wait in waits]
    return found


def repeated(*names, times=5, **options):
    return [operation(name, 10 * time + place, **options) for time in range(times) for place, name in enumerate(names)]


def test_the_first_of_those_that_repeat_alike_tells_steps_apart():
    assert anchor([journal(repeated("a", "b", "c"))]) == "a"


def test_gradients_count_more_than_what_comes_more_often():
    often = [operation("loss", 0.1 * number, nbytes=4) for number in range(100)]
    assert anchor([journal([*often, *repeated("gradients.0", "gradients.1")])]) == "gradients.0"


def test_the_loose_first_step_does_not_matter():
    loose = [operation(f"w{number}", 0.01 * number, nbytes=500) for number in range(20)]
    found = [*loose, *(operation("gradients.0", 1.0 + number, nbytes=10_000) for number in range(9))]
    assert anchor([journal(found)]) == "gradients.0"


def test_what_only_some_ranks_have_tells_no_steps_apart():
    sends = repeated("act", nbytes=10_000, times=20)
    found = [journal([*sends, *repeated("gradients.0")]), journal(repeated("gradients.0"))]
    assert anchor(found) == "gradients.0"
    assert anchor([journal(sends), journal([])]) is None


def test_where_nothing_comes_twice_there_are_no_steps():
    assert anchor([journal([operation("a", 1.0), operation("b", 2.0)])] * 2) is None
    assert anchor([journal([])]) is None
    assert steps(journal([operation("a", 1.0)]), "b") == []


def test_a_step_ends_with_its_last_wait():
    waits = [(1.0, 3.0), (4.0, 5.0), (11.0, 13.0), (14.0, 15.0), (21.0, 23.0)]
    found = steps(journal(repeated("a", times=3), waits), "a")
    assert [(step.since, step.until) for step in found] == [(0.0, 5.0), (5.0, 15.0), (15.0, 23.0)]
    assert [step.key for step in found] == ["a@0", "a@10", "a@20"]


def test_without_waits_steps_go_from_tensor_to_tensor():
    found = steps(journal(repeated("a", times=3)), "a")
    assert [(step.since, step.until) for step in found] == [(0.0, 10.0), (10.0, 20.0), (20.0, 20.5)]


TIMES = st.lists(st.floats(0, 1000), min_size=1, max_size=20, unique=True)


@given(TIMES, TIMES)
def test_steps_follow_each_other_without_gaps(comings, ends):
    waits = sorted((end - 1.0, end) for end in ends)
    found = steps(journal([operation("a", come) for come in comings], waits), "a")
    assert len(found) == len(comings)
    assert all(step.since <= step.until for step in found)
    assert all(before.until == after.since for before, after in pairwise(found))
    for step, come in zip(found, sorted(comings), strict=True):
        assert step.since <= come <= step.until
    assert found[-1].until >= max(comings) + 0.5 - 1e-9 or found[-1].until == pytest.approx(max(comings) + 0.5)
