"""Properties of the names by which a refusal covers a group, whatever its size on other ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordd.negotiation.group_names import covers, group_of, is_group, names_in_group, refused_names
from coordd.ops.arguments import places

BASES = st.text(min_size=1).filter(lambda base: not is_group(base))
SIZES = st.integers(1, 12)


@given(BASES, SIZES, SIZES)
def test_a_refused_group_covers_groups_of_its_name_whatever_their_size(base, mine, theirs):
    (said,) = refused_names([str(name) for name in places(base, mine)])
    assert is_group(said)
    for name in places(base, theirs):
        assert covers(said, str(name))
        assert group_of(str(name)) == (said, theirs)


@given(st.integers(0, 999), SIZES, SIZES)
def test_a_refused_group_without_names_covers_single_operations_too(number, mine, theirs):
    base = f"allreduce.noname.{number}"
    (said,) = refused_names([str(name) for name in names_in_group(base, [None] * mine)])
    assert all(covers(said, str(name)) for name in names_in_group(base, [None] * theirs))
    assert not covers(said, f"allreduce.noname.{number + 1}")


@given(BASES, BASES, SIZES)
def test_it_covers_no_other_group(base, other, size):
    (said,) = refused_names([str(name) for name in places(base, size)])
    assert covers(said, str(places(other, size)[0])) == (base == other)
    assert not covers(said, base)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True))
def test_single_operations_are_refused_by_their_own_names(names):
    said = refused_names(names)
    assert all(any(covers(one, name) for one in said) for name in names)


def test_part_of_a_group_is_not_the_group():
    assert refused_names(["x_1of3"]) == ("x_1of3",)
    assert refused_names(["x_0of2", "y_1of2"]) == ("x_0of2", "y_1of2")
    assert not covers("x_1of3", "x_0of3")
