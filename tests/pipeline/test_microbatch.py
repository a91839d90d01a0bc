"""How a batch is cut into microbatches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.pipeline.microbatch import cut, fitting


def test_sizes_are_nearly_equal():
    assert cut(10, 4) == [slice(0, 3), slice(3, 5), slice(5, 8), slice(8, 10)]


@given(st.integers(1, 200), st.data())
def test_every_row_is_in_one_microbatch_and_sizes_differ_by_one_at_most(rows, data):
    parts = cut(rows, data.draw(st.integers(1, rows)))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_a_batch_may_be_too_small():
    with pytest.raises(ArgumentError, match="3 rows cannot be cut into 4 microbatches"):
        cut(3, 4)
    with pytest.raises(ArgumentError, match="a batch of 1 rows does not reach 2 replicas"):
        fitting(1, 4, 2)
    assert [fitting(rows, 4, 2) for rows in (2, 3, 7, 8, 100)] == [1, 1, 3, 4, 4]
