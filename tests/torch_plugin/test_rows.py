"""Operations along the first dimension: alltoall and reducescatter, on ranks that are threads, over all ways."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coordd.torch as cd
from tests.local_ranks import each_rank, local_ranks

WAYS = [{}, {"shared_memory": False}, {"simulate_hosts": 2}]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, *WHOLE, torch.complex64, torch.complex128, torch.bool)


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank contributes; whole numbers, so that sums are exact."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.fixture(params=[(count, way) for count in (1, 2, 3, 4) for way in range(3)], ids=str)
def ranks(request):
    count, way = request.param
    with local_ranks(count, **WAYS[way if count > 1 else 0]) as found:
        yield found


@pytest.mark.parametrize("shape", [(12, 3), (7, 2), (1, 5), (0, 3), (3, 0), (12,), (30_011, 3)], ids=str)
def test_reducescatter_gives_each_rank_its_rows(ranks, shape):
    count = len(ranks)
    everything = torch.stack([part(rank, *shape) for rank in range(count)])

    def body(rank):
        mine = part(rank, *shape)
        found = [cd.reducescatter(mine, op=cd.Sum), cd.synchronize(cd.reducescatter_async(mine, name="a", op=cd.Sum))]
        found += cd.grouped_reducescatter([mine, mine], op=cd.Sum)
        found += cd.synchronize(cd.grouped_reducescatter_async([mine], name="b", op=cd.Sum))
        assert torch.equal(mine, part(rank, *shape))
        return found

    wanted = torch.tensor_split(everything.sum(0), count)
    for rank, found in enumerate(ranks.each(body)):
        for rows in found:
            assert torch.equal(rows, wanted[rank])


def test_reducescatter_of_every_type_and_operation(ranks):
    count = len(ranks)

    def body(rank):
        for dtype in DTYPES:
            mine = part(rank, 5, 2, dtype=dtype)
            for op in (cd.Sum, cd.Average, cd.Min, cd.Max, cd.Product):
                try:
                    rows = cd.reducescatter(mine, op=op)
                except cd.ArgumentError:
                    with pytest.raises(cd.ArgumentError):
                        cd.allreduce(mine, op=op)
                    continue
                assert rows.dtype == dtype
                wanted = torch.tensor_split(cd.allreduce(mine, op=op), count)[rank]
                torch.testing.assert_close(rows, wanted)

    ranks.each(body)


def test_reducescatter_scales_and_takes_process_sets(ranks):
    count = len(ranks)
    members = range(0, count, 2)

    def body(rank):
        if rank not in members:
            return
        some = cd.ProcessSet(members)
        rows = cd.reducescatter(
            torch.ones(4, 2), op=cd.Sum, process_set=some, prescale_factor=0.5, postscale_factor=3.0
        )
        assert rows.tolist() == [[1.5 * len(members)] * 2] * (4 // len(members))

    ranks.each(body)


def test_what_cannot_be_scattered_is_refused():
    def body(_):
        for tensor, details, text in [
            (torch.tensor(1.0), {}, "rank-zero tensor"),
            (torch.ones(2, dtype=torch.int32), {"op": cd.Average}, "truncated"),
            (torch.ones(2), {"op": cd.Adasum}, "whole tensors"),
        ]:
            with pytest.raises(cd.ArgumentError, match=text):
                cd.reducescatter(tensor, **details)

    each_rank(2, body)


def test_ranks_that_disagree_on_the_shape_are_told():
    def body(rank):
        with pytest.raises(cd.MismatchError, match="shape"):
            cd.reducescatter(torch.ones(2 + rank, 2), name="w")

    each_rank(2, body)


@pytest.mark.parametrize("op", [cd.Sum, cd.Average])
def test_reducescatter_has_horovod_s_gradient(op):
    count = 3

    def body(rank):
        mine = part(rank, 7, 2, dtype=torch.float64).requires_grad_()
        (cd.reducescatter(mine, name="w", op=op) * (rank + 1)).sum().backward()
        return mine.grad

    weights = torch.cat([torch.full((rows, 2), rank + 1.0) for rank, rows in enumerate((3, 2, 2))]).double()
    for found in each_rank(count, body):
        assert torch.equal(found, weights * (count if op is cd.Sum else 1))


def test_alltoall_without_splits_divides_evenly(ranks):
    count = len(ranks)
    inputs = [part(rank, 3 * count, 2) for rank in range(count)]

    def body(rank):
        return cd.alltoall(inputs[rank]), cd.synchronize(cd.alltoall_async(inputs[rank], name="a"))

    for rank, found in enumerate(ranks.each(body)):
        for rows in found:
            assert torch.equal(rows, torch.cat([each[3 * rank : 3 * rank + 3] for each in inputs]))


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_alltoall_gives_each_rank_as_many_rows_as_it_is_to_get(data):
    count = data.draw(st.integers(1, 4))
    line = st.lists(st.integers(0, 7), min_size=count, max_size=count)
    table = data.draw(st.lists(line, min_size=count, max_size=count))
    dtype, row = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([(), (0,), (3,), (2, 1001)]))
    spare = data.draw(st.integers(0, 2))
    inputs = [part(rank, sum(table[rank]) + spare, *row, dtype=dtype) for rank in range(count)]

    def body(rank):
        return cd.alltoall(inputs[rank], torch.tensor(table[rank], dtype=torch.int64))

    way = data.draw(st.sampled_from(WAYS)) if count > 1 else {}
    for rank, (rows, received) in enumerate(each_rank(count, body, **way)):
        starts = [sum(table[source][:rank]) for source in range(count)]
        wanted = [inputs[source][start : start + table[source][rank]] for source, start in enumerate(starts)]
        assert torch.equal(rows, torch.cat(wanted))
        assert rows.dtype == dtype
        assert received.tolist() == [table[source][rank] for source in range(count)]
        assert received.dtype == torch.int64


def test_gradients_of_alltoall_go_back_to_where_the_rows_came_from(ranks):
    count = len(ranks)

    def body(rank):
        mine = part(rank, 2 * count + 1, 2, dtype=torch.float64).requires_grad_()
        rows, _ = cd.alltoall(mine, [2] * count, name="w")
        (rows * (rank + 1)).sum().backward()
        return mine.grad

    for found in ranks.each(body):
        wanted = [[float(rank + 1)] * 2 for rank in range(count) for _ in range(2)]
        assert found.tolist() == [*wanted, [0.0, 0.0]]


@pytest.mark.parametrize(
    ("tensor", "splits", "text"),
    [
        (torch.tensor(1.0), None, "rank-zero tensor"),
        (torch.ones(3), None, "not an even multiple of the number of workers"),
        (torch.ones(3), [[1, 2]], "expects a 1D splits tensor"),
        (torch.ones(3), torch.tensor([1.0, 2.0]), "integer elements"),
        (torch.ones(3), [1, 3], "Sum of splits entries is greater than the first dimension"),
        (torch.ones(3), [1, 1, 1], "does not equal number of workers"),
        (torch.ones(3), [-1, 1], "0 or more rows"),
    ],
)
def test_splits_that_do_not_fit_are_refused_and_the_daemon_goes_on(tensor, splits, text):
    def body(_):
        with pytest.raises(cd.ArgumentError, match=text):
            cd.alltoall(tensor, splits)
        assert cd.allreduce(torch.tensor(1), op=cd.Sum) == 2

    each_rank(2, body)


def test_rows_that_differ_in_length_are_refused_everywhere():
    def body(rank):
        with pytest.raises(cd.MismatchError, match=r"\(any, 2\).*\(any, 3\)"):
            cd.alltoall(torch.ones(2, 2 + rank), name="w")

    each_rank(2, body)


def test_what_alltoall_has_made_goes_without_the_garbage_collector():
    def body(_):
        found = weakref.ref(cd.alltoall(torch.ones(4, 2)))
        cd.barrier()  # until then the daemon's thread may still hold what it has just handed over
        return found()

    gc.disable()
    try:
        assert each_rank(2, body) == [None] * 2
    finally:
        gc.enable()
