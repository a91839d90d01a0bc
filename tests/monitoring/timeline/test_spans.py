from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coordd.monitoring.timeline.spans import length, minus, union, within

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def moments(spans):
    """Which unit stretches are covered."""
    return {moment for since, until in spans for moment in range(since, until)}


@given(SPANS)
def test_a_union_is_ascending_disjoint_and_covers_the_same(spans):
    found = union(spans)
    assert moments(found) == moments(spans)
    assert all(since < until for since, until in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))
    assert length(found) == len(moments(spans))


@given(SPANS, SPANS)
def test_a_difference_covers_what_only_the_first_does(spans, taken):
    found = minus(union(spans), union(taken))
    assert moments(found) == moments(spans) - moments(taken)
    assert length(found) == len(moments(found))


@given(SPANS, st.integers(0, 30), st.integers(0, 30))
def test_nothing_sticks_out(spans, since, until):
    assert moments(within(spans, since, until)) == moments(spans) & set(range(since, until))
