"""Collectives, all ranks in one thread: the generators are advanced in a random order that the seed decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordd.collectives import ring
from coordd.collectives.ring import Group, Pulse, Reduction
from coordd.ops.messages import ReduceOp
from coordd.transport.local import LocalWorld
from tests.transport.arithmetic import KINDS, ORDERED, expected, pieces, same_bits, values

Arrays = list[np.ndarray]

TURNS = 100_000
counts = st.integers(1, 5)
seeds = st.integers(0, 1 << 32)
chunks = st.sampled_from([1, 7, 64, 256, 4096])
sizes = st.one_of(st.integers(0, 12), st.integers(0, 3000))


def drive(
    operations: Callable[[Group], Any],
    members: Sequence[int],
    *,
    chunk: int,
    seed: int,
    world: LocalWorld | None = None,
) -> None:
    """Runs an operation on all members, in a random order of steps, and checks that nothing is left behind."""
    world = world or LocalWorld(max(members) + 1)
    order = random.Random(seed)
    running = {}
    for rank in members:
        lane = world.join(rank).collective
        running[rank] = operations(Group(lane, members, rank, tag=seed % 1000 * 16, chunk=chunk, pulse=Pulse()))
    for _ in range(TURNS):
        if not running:
            break
        rank = order.choice(list(running))
        if next(running[rank], None) is None and running[rank].gi_frame is None:
            del running[rank]
    assert not running, f"ranks {list(running)} do not end"
    assert not world.collective._sent
    assert not world.collective._wanted


def allreduce(arrays: list[Arrays], reduction: Reduction, *, chunk: int, seed: int = 0) -> None:
    """Reduces each member's arrays in place."""
    drive(
        lambda group: ring.allreduce(group, arrays[group.me], reduction),
        range(len(arrays)),
        chunk=chunk,
        seed=seed,
    )


@settings(deadline=None, max_examples=150)
@given(
    count=counts,
    kind=st.sampled_from(KINDS),
    data=st.data(),
    lengths=st.lists(sizes, min_size=1, max_size=3),
    chunk=chunks,
    seed=seeds,
)
def test_a_reduction_is_bitwise_the_sequential_one(*, count, kind, data, lengths, chunk, seed):
    dtype, ops = kind
    op = data.draw(st.sampled_from(ops))
    scaled = dtype.kind != "b"
    prescale = data.draw(st.sampled_from([1.0, 0.5, 1 / 3])) if scaled else 1.0
    postscale = data.draw(st.sampled_from([1.0, 0.3 if dtype.kind in "iu" else 3.0])) if scaled else 1.0
    if sum(lengths) * dtype.itemsize > chunk * 400:
        chunk = 4096
    given_ = [
        [values(dtype, length, seed + 10 * rank + i) for i, length in enumerate(lengths)] for rank in range(count)
    ]
    arrays = [[array.copy() for array in mine] for mine in given_]
    reduction = Reduction(op, dtype, prescale=prescale, postscale=postscale)
    with np.errstate(all="ignore"):
        allreduce(arrays, reduction, chunk=chunk, seed=seed)
        wanted = [expected([mine[i] for mine in given_], op, prescale, postscale) for i in range(len(lengths))]
    for mine in arrays:
        assert all(same_bits(array, other) for array, other in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("chunk", [1 << 20, 96 << 10, 1000])
def test_the_result_does_not_depend_on_how_tensors_are_fused(count, chunk):
    """Beyond 64 KiB slices travel, below everything goes to everybody: the bits are the same."""
    inputs = [values(np.dtype(np.float32), 70_000, rank) for rank in range(count)]
    wanted = expected(inputs, ReduceOp.AVERAGE)
    reduction = Reduction(ReduceOp.AVERAGE, np.dtype(np.float32))
    for cuts in ([], [1], [3, 50_000], [69_999]):
        arrays = [[piece.copy() for piece in np.split(array, cuts)] for array in inputs]
        allreduce(arrays, reduction, chunk=chunk)
        assert all(same_bits(np.concatenate(mine), wanted) for mine in arrays)


def test_a_product_of_complex_numbers_has_the_same_bits_everywhere():
    inputs = [values(np.dtype(np.complex128), 60, rank) for rank in range(3)]
    arrays = [[piece.copy() for piece in np.split(array, range(1, 20))] for array in inputs]
    reduction = Reduction(ReduceOp.PRODUCT, np.dtype(np.complex128))
    allreduce(arrays, reduction, chunk=1 << 20)
    wanted = expected(inputs, ReduceOp.PRODUCT)
    assert all(same_bits(np.concatenate(mine), wanted) for mine in arrays)


def test_bfloat16_is_added_in_fp32():
    """In bfloat16 each 1 would vanish beside 256."""
    dtype = np.dtype(ml_dtypes.bfloat16)
    arrays = [[np.full(3, value, dtype)] for value in (256, 1, 1)]
    allreduce(arrays, Reduction(ReduceOp.SUM, dtype), chunk=64)
    assert all(array.astype(float).tolist() == [258.0] * 3 for (array,) in arrays)


@pytest.mark.parametrize("op", ORDERED)
def test_nan_is_not_hidden_by_an_order(op):
    arrays = [[np.array([np.nan, 1.0])], [np.array([0.0, np.nan])]]
    allreduce(arrays, Reduction(op, np.dtype(float)), chunk=64)
    assert all(np.isnan(array).all() for (array,) in arrays)


@settings(deadline=None, max_examples=80)
@given(counts, sizes, chunks, seeds, st.data())
@example(3, 100_000, 1 << 20, 5, None)
@example(4, 100_000, 256 << 10, 6, None)
def test_a_broadcast_copies_the_roots_array(count, size, chunk, seed, data):
    root = data.draw(st.integers(0, count - 1)) if data else 1
    chunk = max(chunk, size // 100)
    arrays = [values(np.dtype(np.int32), size, seed + rank) for rank in range(count)]
    wanted = arrays[root].copy()
    drive(lambda group: ring.broadcast(group, arrays[group.me], root), range(count), chunk=chunk, seed=seed)
    assert all(same_bits(array, wanted) for array in arrays)


@settings(deadline=None, max_examples=80)
@given(st.lists(sizes, min_size=1, max_size=5), chunks, seeds)
@example([0, 0, 0], 64, 0)
@example([0, 100_000, 1], 32 << 10, 0)
def test_an_allgather_joins_blocks_of_any_size(lengths, chunk, seed):
    chunk = max(chunk, max(lengths) // 100)
    given_, blocks = pieces(lengths, seed)
    drive(lambda group: ring.allgather(group, blocks[group.me]), range(len(lengths)), chunk=chunk, seed=seed)
    for mine in blocks:
        assert all(same_bits(block, wanted) for block, wanted in zip(mine, given_, strict=True))


@settings(deadline=None, max_examples=30)
@given(seeds, st.permutations(range(3)))
def test_operations_in_flight_do_not_mix_their_messages(seed, starts):
    """Three ranks start three operations in three orders of their own, and two process sets overlap."""
    world = LocalWorld(3)
    sets = [(0, 1, 2), (0, 2), (1, 2)]
    reduction = Reduction(ReduceOp.SUM, np.dtype(np.int64))
    arrays = {(rank, number): np.full(40, 1 << rank) for number, members in enumerate(sets) for rank in members}
    running = []
    for (rank, number), array in arrays.items():
        group = Group(world.join(rank).collective, sets[number], rank, tag=16 * number, chunk=64, pulse=Pulse())
        running.append((starts[rank] * number, ring.allreduce(group, [array], reduction)))
    order = random.Random(seed)
    left = [steps for _, steps in sorted(running, key=lambda item: item[0])]
    for _ in range(TURNS):
        if not left:
            break
        steps = order.choice(left)
        if next(steps, None) is None and steps.gi_frame is None:
            left.remove(steps)
    assert not left
    for (_, number), array in arrays.items():
        assert array.tolist() == [sum(1 << rank for rank in sets[number])] * 40
