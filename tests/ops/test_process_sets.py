"""Process sets: values that are equal when their members are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd.parallel import grid

sizes = st.integers(1, 8)
subsets = sizes.flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1)))


@given(subsets, st.randoms())
def test_sets_with_the_same_members_are_the_same(subset, random):
    _, ranks = subset
    shuffled = random.sample(sorted(ranks), len(ranks))
    assert ProcessSet(shuffled) == ProcessSet(ranks)
    assert len({ProcessSet(shuffled), ProcessSet(ranks)}) == 1
    assert ProcessSet(shuffled).ranks == tuple(sorted(ranks))


@given(subsets)
def test_requests_carry_the_members_and_nothing_for_the_whole_world(subset):
    size, ranks = subset
    for rank in ranks:
        expected = () if len(ranks) == size else tuple(sorted(ranks))
        assert ProcessSet(ranks).members(rank=rank, size=size) == expected


@given(sizes)
def test_the_global_set_is_everybody(size):
    assert global_process_set.members(rank=size - 1, size=size) == ()


@pytest.mark.parametrize("ranks", [(0, 0), (-1,), (1, 2, 1)])
def test_a_rank_is_there_once_and_not_negative(ranks):
    with pytest.raises(ArgumentError, match="each rank once, and none below 0"):
        ProcessSet(ranks)


def test_who_is_not_a_member_is_refused():
    with pytest.raises(ArgumentError, match=r"Rank 0 is not a member of the provided process set \(1, 2\)"):
        ProcessSet((1, 2)).members(rank=0, size=4)


def test_ranks_that_do_not_exist_are_refused():
    with pytest.raises(ArgumentError, match="world of 2"):
        ProcessSet((0, 2)).members(rank=0, size=2)


def test_a_set_cannot_be_changed():
    with pytest.raises(AttributeError):
        ProcessSet((0,)).ranks = (1,)


def test_the_sets_of_users_equal_those_of_operations():
    assert grid.ProcessSet([1, 0]) == ProcessSet([0, 1])
    assert grid.global_process_set == ProcessSet()
    assert len({grid.ProcessSet([2]), ProcessSet([2]), ProcessSet([3])}) == 2
    assert ProcessSet([2]) != (2,)
