"""Sums and averages of integers are those of their type: what does not fit wraps, as in MPI, NumPy and PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd import api
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set
from tests.local_ranks import local_ranks

DTYPES = [np.int8, np.uint8, np.int16, np.int32, np.int64]
WAYS = {"one host": {}, "network": {"shared_memory": False}, "two hosts": {"simulate_hosts": 2}}
SETS = {"all": global_process_set, "some": ProcessSet([0, 2])}


@pytest.fixture(scope="module", params=WAYS)
def ranks(request):
    with local_ranks(3, as_horovod=True, **WAYS[request.param]) as found:
        yield found


@st.composite
def rows(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    limits = np.iinfo(dtype)
    values = st.integers(int(limits.min), int(limits.max))
    return np.array(draw(st.lists(st.lists(values, min_size=4, max_size=4), min_size=3, max_size=3)), dtype)


def wrapped(total: int, dtype: np.dtype) -> int:
    return int(np.array(total % (1 << 8 * dtype.itemsize), np.uint64).astype(dtype))


def divided(total: int, count: int) -> int:
    """Exactly, and toward zero."""
    return abs(total) // count * (1 if total >= 0 else -1)


@settings(max_examples=25, deadline=None)
@given(rows(), st.sampled_from([ReduceOp.SUM, ReduceOp.AVERAGE]), st.sampled_from(sorted(SETS)))
def test_what_does_not_fit_wraps_once_and_an_average_divides_that(ranks, given_rows, op, chosen):
    members = SETS[chosen].ranks or range(3)
    sums = [wrapped(sum(int(given_rows[rank][i]) for rank in members), given_rows.dtype) for i in range(4)]
    wanted = sums if op is ReduceOp.SUM else [divided(total, len(members)) for total in sums]

    def body(rank):
        if rank not in members:
            return None
        ops, process_set = api.operations(), SETS[chosen]
        whole = ops.allreduce(given_rows[rank].copy(), op=op, process_set=process_set).result()
        part = ops.reducescatter(given_rows[rank].copy(), op=op, process_set=process_set).result()
        assert whole.dtype == part.dtype == given_rows.dtype
        return whole.tolist(), part.tolist()

    found = [each for each in ranks.each(body) if each is not None]
    assert [whole for whole, _ in found] == [wanted] * len(members)
    assert [value for _, part in found for value in part] == wanted
