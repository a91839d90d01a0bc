from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordd.parallel.fingerprint import alike, differences, fingerprint

lines = st.lists(st.sampled_from("abcd"), max_size=4, unique=True)


@given(st.lists(lines, min_size=1, max_size=4))
def test_the_greatest_of_all_prints_tells_whether_all_have_the_same(everybody):
    greatest = [max(numbers) for numbers in zip(*map(fingerprint, everybody), strict=True)]
    assert alike(greatest) == (len(set(map(tuple, everybody))) == 1)
    assert max(map(abs, greatest)) < 1 << 63


def test_what_all_have_is_not_listed():
    assert differences([(0, ["a", "b"]), (2, ["b", "c"]), (3, ["b", "c"])]) == "a on rank 0 only; c on ranks 2-3 only"


def test_a_long_list_is_cut():
    assert differences([(0, "abcdefg"), (1, "")]).endswith("e on rank 0 only and 2 more")
