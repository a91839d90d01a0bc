"""From buckets to results: packing, several operations at once, and bits that depend on nothing but the values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd import api
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet
from tests.local_ranks import each_rank, local_ranks

SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3), (1000,), (200, 200), (70_000,)]


def tensor(rank: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    source = np.random.default_rng(100 * rank + number)
    return np.asarray(source.normal(size=shape) * 10.0 ** source.integers(-3, 4), np.float32)


def reduced(count: int, shapes: list[tuple[int, ...]], op: ReduceOp, **options: float) -> list[list[np.ndarray]]:
    """Reduces tensors of these shapes at once; every rank starts them in an order of its own."""

    def body(rank: int) -> list[np.ndarray]:
        numbers = list(range(len(shapes)))
        np.random.default_rng(rank).shuffle(numbers)
        handles = {
            number: api.operations().allreduce(tensor(rank, number, shapes[number]), name=str(number), op=op)
            for number in numbers
        }
        return [handles[number].result(10.0) for number in range(len(shapes))]

    return each_rank(count, body, **options)


def sequential(count: int, shapes: list[tuple[int, ...]], op: ReduceOp) -> list[np.ndarray]:
    """((x0 + x1) + x2) …, in one process."""
    found = []
    for number, shape in enumerate(shapes):
        total = tensor(0, number, shape)
        for rank in range(1, count):
            total = total + tensor(rank, number, shape)
        found.append(total / np.float32(count) if op is ReduceOp.AVERAGE else total)
    return found


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.0001, 0.01, 32.0]),
    st.sampled_from([4, 64, 1024]),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
)
def test_results_are_bitwise_the_sequential_ones_however_tensors_are_fused(  # noqa: PLR0917
    count, shapes, fusion_mb, chunk_kb, cycle_ms, shared_memory
):
    """And whatever way they take."""
    wanted = sequential(count, shapes, ReduceOp.AVERAGE)
    options = {"fusion_mb": fusion_mb, "chunk_kb": chunk_kb, "cycle_ms": cycle_ms, "shared_memory": shared_memory}
    for found in reduced(count, shapes, ReduceOp.AVERAGE, **options):
        for array, other in zip(found, wanted, strict=True):
            assert array.shape == other.shape
            assert array.tobytes() == other.tobytes()


@pytest.mark.parametrize("cache_capacity", [0, 2, 4096])
def test_the_cache_changes_nothing_but_speed(cache_capacity):
    def body(rank):
        found = []
        for step in range(6):
            handles = [
                api.operations().allreduce(np.full(3, float(rank + step)), name=f"{number}") for number in range(5)
            ]
            found += [handle.result(10.0)[0] for handle in handles]
        return found

    wanted = [step + 1.0 for step in range(6) for _ in range(5)]
    assert each_rank(3, body, cache_capacity=cache_capacity) == [wanted] * 3


@pytest.mark.parametrize("settings", [{}, {"shared_memory": False}, {"simulate_hosts": 2}, {"simulate_hosts": 3}])
def test_types_operations_and_process_sets_in_flight_together_do_not_mix(settings):
    pair = ProcessSet([0, 2])

    def body(rank):
        ops = api.operations()
        handles = [
            ops.allreduce(np.full(3, rank, np.int64), name="sum", op=ReduceOp.SUM),
            ops.allreduce(np.full(3, rank, np.int16), name="short", op=ReduceOp.SUM),
            ops.allreduce(np.full(3, rank, np.int64), name="max", op=ReduceOp.MAX),
            ops.allreduce(np.full(3, rank, np.float32), name="mean"),
            ops.broadcast(np.full(2, rank), 1, name="root"),
            ops.allgather(np.full(rank, rank), name="all"),
        ]
        if rank != 1:
            handles.append(ops.allreduce(np.full(3, rank, np.int64), name="pair", op=ReduceOp.SUM, process_set=pair))
        ops.barrier().result(10.0)
        return [handle.result(10.0).tolist() for handle in handles]

    common = [[3] * 3, [3] * 3, [2] * 3, [1.0] * 3, [1, 1], [1, 2, 2]]
    assert each_rank(3, body, **settings) == [[*common, [2] * 3], common, [*common, [2] * 3]]


def strided(flat: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "every second": flat[::2],
        "backwards": flat[::-1],
        "column": flat.reshape(-1, 8)[:, 3],
        "transposed": flat.reshape(-1, 8).T,
        "Fortran": np.asfortranarray(flat.reshape(-1, 8)),
        "part": flat.reshape(-1, 8)[1:-1, 2:5],
    }


@pytest.mark.parametrize("layout", strided(np.zeros(64)))
@pytest.mark.parametrize("size", [64, 400_000])
@pytest.mark.parametrize("company", [False, True])
def test_any_layout_is_reduced_where_it_lies_and_nothing_beside_it(layout, size, company):
    def body(rank):
        whole = np.arange(size, dtype=np.float64)
        array = strided(whole)[layout]
        expected = whole.copy()
        mine = strided(expected)[layout]
        mine *= 2
        handles = [api.operations().allreduce(array, name="x", op=ReduceOp.SUM)]
        if company:
            handles.append(api.operations().allreduce(np.ones(3), name="y", op=ReduceOp.SUM))
        for handle in handles:
            handle.result(10.0)
        assert np.array_equal(array, mine)
        if layout != "Fortran":
            assert np.array_equal(whole, expected)

    each_rank(2, body)


def test_more_operations_than_fly_at_once_are_queued():
    def body(rank):
        handles = [api.operations().allreduce(np.full(9, float(number)), name=str(number)) for number in range(300)]
        return [handle.result(10.0)[0] for handle in handles]

    assert each_rank(2, body, fusion_mb=0) == [[float(number) for number in range(300)]] * 2


def test_what_lands_runs_before_the_result_is_there():
    order = []

    def body(rank):
        def land(array):
            order.append(("land", rank))
            return array.tolist()

        handle = api.operations().allreduce(np.ones(2), name="x", op=ReduceOp.SUM, land=land)
        found = handle.result(10.0)
        order.append(("result", rank))
        return found

    assert each_rank(2, body) == [[2.0, 2.0]] * 2
    assert order.index(("land", 0)) < order.index(("result", 0))


def test_a_landing_that_fails_fails_its_handle_and_the_daemon_goes_on():
    """A compressor of the user's runs there: its error belongs to who waits, not to the whole job."""

    def refuse(array):
        raise ValueError("not this one")

    with local_ranks(2) as ranks:

        def body(rank):
            ops = api.operations()
            with pytest.raises(ValueError, match="not this one"):
                ops.allreduce(np.ones(2), name="x", land=refuse).result(10.0)
            ops.send(np.ones(2), 1 - rank, name="y")
            with pytest.raises(ValueError, match="not this one"):
                ops.recv(None, 1 - rank, name="y", land=refuse).result(10.0)
            return ops.allreduce(np.ones(2), name="x").result(10.0).tolist()

        assert ranks.each(body) == [[1.0, 1.0]] * 2
