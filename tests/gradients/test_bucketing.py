"""Dividing gradients into buckets."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.gradients.bucketing import Grouping, partition


def gradients(sizes: list[int], kinds: list[str]) -> list[Any]:
    return [SimpleNamespace(nbytes=size, kind=kind, owner=None) for size, kind in zip(sizes, kinds, strict=True)]


def nbytes(group: list[Any]) -> int:
    return sum(gradient.nbytes for gradient in group)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abc")), max_size=40),
    st.integers(0, 120),
    st.integers(0, 60),
)
@example([(10, "a"), (10, "a")], 10, 10)
def test_every_gradient_has_its_place_and_no_bucket_is_too_large(found, limit, last):
    last = min(last, limit)
    given_ = gradients([size for size, _ in found], [kind for _, kind in found])
    divided = partition(given_, limit=limit, last=last)
    for kind in "abc":
        alike = [group for group in divided if group[0].kind == kind]
        wanted = [gradient for gradient in given_ if gradient.kind == kind]
        assert list(itertools.chain(*alike)) == wanted  # in their order, and of this type only
        assert all(nbytes(group) <= limit or len(group) == 1 for group in alike)
        if len(alike) > 1:
            assert nbytes(alike[-1]) <= last or len(alike[-1]) == 1
        for group, after in itertools.pairwise(alike[:-1]):  # none is smaller than it has to be
            assert nbytes([group[-1], *after]) > limit
    assert sum(map(len, divided)) == len(given_)


def test_the_last_bucket_is_small_unless_all_is_little():
    """What is ready last is what backward cannot hide."""
    sizes = [nbytes(group) for group in partition(gradients([10] * 30, ["a"] * 30), limit=100, last=20)]
    assert sizes == [80, 100, 100, 20]
    assert len(partition(gradients([10] * 4, ["a"] * 4), limit=100, last=20)) == 1


def owned(count: int) -> list[Any]:
    return [SimpleNamespace(nbytes=10, kind="a", owner=f"parameter {index}") for index in range(count)]


def places(groups: list[list[Any]]) -> list[list[int]]:
    return [[int(item.owner.split()[1]) for item in group] for group in groups]


def test_so_many_groups_of_nearly_equal_size():
    items = owned(6)
    assert places(Grouping(3, kind=str).buckets(items, limit=1, last=1)) == [[0, 1], [2, 3], [4, 5]]
    assert places(Grouping(groups=2, kind=str).buckets(items, limit=1, last=1)) == [[0, 1, 2], [3, 4, 5]]


def test_the_user_s_own_groups_and_the_rest_as_usual():
    items = owned(4)
    grouping = Grouping(groups=[[items[2].owner, items[0].owner]], kind=str)
    assert places(grouping.buckets(items, limit=100, last=100)) == [[1, 3], [0, 2]]


def test_choices_are_equal_for_equal_models_wherever_they_lie():
    def choice(chosen: int, count: int = 0) -> object:
        held = [item.owner for item in owned(2)]
        groups = None if count else [[held[chosen]]]
        return Grouping(count, groups, kind=str).choice(held)

    assert choice(0) == choice(0) == (0, (0, -1))
    assert choice(1) == (0, (-1, 0))
    assert choice(0, 2) == (2, (-1, -1))


def test_what_is_no_parameter_is_refused():
    with pytest.raises(ArgumentError, match="list of lists of parameters"):
        Grouping(groups=[[1]], kind=str)
