"""The numbers and slots of buckets: equal on all ranks, and apart wherever a rank could confuse them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from coordd.negotiation.sequence_numbers import SLOTS, Numbering

some_sets = st.sets(st.integers(0, 7), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


def groups(numbering: Numbering, sets: list[tuple[int, ...]], *, depth: int) -> dict[tuple[int, ...], int]:
    return {members: numbering.next(members)[1] // depth for members in sets}


def test_numbers_run_through_and_slots_go_round_within_each_set():
    numbering = Numbering(groups=4, depth=3)
    found = [numbering.next(members) for members in [(), (0, 1), (), (), (0, 1), (2,), (), (0, 1)]]
    assert [number for number, _ in found] == list(range(1, 9))
    assert [slot for _, slot in found] == [1, 4, 2, 0, 5, 4, 1, 3]


def test_the_axes_of_a_grid_take_a_group_each():
    """Sets without a common rank share slots, so that few are touched."""
    rows = [tuple(range(start, start + 4)) for start in range(0, 64, 4)]
    columns = [tuple(range(start, 64, 4)) for start in range(4)]
    found = groups(Numbering(), [(), *rows, *columns], depth=16)
    assert set(found.values()) == {0, 1, 2}
    assert len({found[()], found[rows[0]], found[columns[0]]}) == 3


@given(st.lists(some_sets, max_size=30, unique=True))
def test_sets_with_a_common_rank_have_slots_of_their_own_as_long_as_there_are_any(sets):
    found = groups(Numbering(groups=64), [(), *sets], depth=16)
    for one, other in itertools.combinations(sets, 2):
        assert set(one).isdisjoint(other) or found[one] != found[other]
    assert 0 not in [found[members] for members in sets]


@given(st.lists(st.one_of(st.just(()), some_sets), max_size=60))
def test_all_slots_are_in_range_however_many_sets_there_are(sets):
    for numbering, limit in ((Numbering(), SLOTS), (Numbering(groups=2, depth=1), 2)):
        assert all(0 <= numbering.next(members)[1] < limit for members in sets)
