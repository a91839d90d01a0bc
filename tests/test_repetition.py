"""Equal steps are noticed when the last of them is complete, whatever plans they were cut into."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.repetition import Repetition

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


slots = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)


def cut(step: list[int], places: list[int]) -> list[list[tuple[int, ...]]]:
    """A step as plans of one bucket each."""
    bounds = [0, *sorted({place for place in places if place < len(step)}), len(step)]
    return [[tuple(step[a:b])] for a, b in pairwise(bounds) if a < b]


@given(st.lists(st.tuples(slots, st.lists(st.integers(1, 5))), min_size=1, max_size=12), st.integers(1, 4))
def test_equal_steps_in_a_row_are_all_that_counts(steps, needed):
    """A model that knows where steps begin and end; a slot at the start and one at the end tell the detector."""
    repetition, row, last = Repetition(needed), 0, None
    for step, places in steps:
        row = row + 1 if frozenset(step) == last else 1
        last = frozenset(step)
        *before, final = [bool(found) for plan in cut([9, *step, 8], places) for found in [repetition.observe(plan)]]
        assert not any(before)
        assert final == (row >= max(2, needed))
        if final:
            repetition.judge(repetition.needed)
            row, last = 0, None


@given(st.lists(st.lists(slots, max_size=3), max_size=20))
def test_what_is_found_holds_every_slot_once(plans):
    repetition = Repetition(2)
    for plan in plans:
        found = repetition.observe([tuple(group) for group in plan])
        locked = [slot for group in found for slot in group]
        assert len(locked) == len(set(locked))
