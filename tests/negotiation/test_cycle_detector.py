"""Equal steps are noticed when the last of them is complete, whatever plans they were cut into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.negotiation.cycle_detector import Repetition

STEP = [(0, 1), (2,)]


def feed(repetition: Repetition, *plans: list[tuple[int, ...]]) -> list[bool]:
    return [bool(repetition.observe(plan)) for plan in plans]


@pytest.mark.parametrize(("steps", "needed"), [(1, 2), (2, 2), (3, 3), (7, 7)])
def test_the_last_of_so_many_equal_steps_is_noticed_when_it_is_complete(steps, needed):
    assert feed(Repetition(steps), *[STEP] * needed) == [False] * (needed - 1) + [True]


def test_a_step_may_come_in_several_plans_and_the_last_ones_buckets_count():
    repetition = Repetition(2)
    assert feed(repetition, [(0, 1, 2)], [(1,)], [(2,)]) == [False] * 3
    assert list(repetition.observe([(0,)])) == [(1,), (2,), (0,)]


def test_a_step_with_more_or_less_starts_the_count_anew():
    plans = [[(0, 1)], [(0, 1)], [(0, 1, 2)], [(0, 1)], [(0, 1)], [(0, 1)]]
    assert feed(Repetition(3), *plans) == [False] * 5 + [True]


def test_what_comes_once_only_does_not_matter_after_it_has_gone():
    assert feed(Repetition(2), [(0, 9)], [(0,)], [(0,)]) == [False, False, True]


def test_another_tensor_in_a_slot_starts_the_count_anew():
    repetition = Repetition(2)
    feed(repetition, STEP)
    assert not repetition.observe(STEP, changed=[1])
    assert feed(repetition, STEP, STEP) == [False, True]
    assert not Repetition(2).observe(STEP, changed=[7])


def test_a_slot_that_is_not_in_the_step_may_change():
    repetition = Repetition(2)
    feed(repetition, STEP)
    assert repetition.observe(STEP, changed=[7])


def test_a_lock_that_does_not_last_makes_the_next_one_take_twice_as_long():
    repetition = Repetition(3)
    needed = []
    for _ in range(12):
        repetition.judge(repetition.needed - 1)
        needed.append(repetition.needed)
    assert needed == [6, 12, 24, 48, 96, 192, 384, 768, 1024, 1024, 1024, 1024]
    repetition.judge(1024)
    assert repetition.needed == 3


def test_after_a_lock_the_count_starts_anew():
    repetition = Repetition(2)
    feed(repetition, STEP, STEP)
    repetition.judge(2)
    assert feed(repetition, STEP, STEP) == [False, True]


buckets = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple), max_size=4)
order = st.sampled_from([[(0, 1), (2,)], [(2,), (0, 1)], [(0, 1, 2)], [(1,)], [(0, 1)], [(2,)]])


def row(groups: list[tuple[int, ...]]) -> int:
    """How many equal steps the end of a history divides into, counted the slow way."""
    steps: list[set[int]] = []
    rest = list(groups)
    while rest:
        step: set[int] = set()
        while rest and step.isdisjoint(rest[-1]):
            step.update(rest.pop())
        steps.append(step)
    return next((count for count, step in enumerate(steps) if step != steps[0]), len(steps))


@given(st.lists(buckets | order, max_size=30), st.integers(1, 4))
def test_equal_steps_in_a_row_are_all_that_counts(plans, needed):
    repetition = Repetition(needed)
    history: list[tuple[int, ...]] = []
    for plan in plans:
        history += plan
        found = repetition.observe(plan)
        assert bool(found) == (row(history) >= max(2, needed))
        locked = [slot for group in found for slot in group]
        assert len(locked) == len(set(locked))
        assert list(found) == history[len(history) - len(found) :]


def test_it_does_not_matter_where_in_a_step_the_count_begins():
    """As after a lock that was broken in the middle; then a plan runs over the end of a step, then none does."""
    repetition = Repetition(3)
    plans = [[(2,)], [(0, 1), (2,)], [(0, 1)], [(2,), (0, 1)], [(2,)]]
    assert feed(repetition, *plans) == [False, False, False, True, True]


def test_memory_is_that_of_one_step():
    repetition = Repetition(1 << 20)
    for slot in range(10_000):
        repetition.observe([(slot % 7,)])
        assert len(repetition._groups) <= 7
        assert len(repetition._marks) <= 8
