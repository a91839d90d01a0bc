"""Collectives in common memory, all ranks in one thread, in a random order that the seed decides.

What a rank owns is spoilt as soon as its own operation has ended, as by the user's next step: nobody may need it then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordd.collectives import direct
from coordd.collectives.ring import Reduction
from coordd.ops.messages import ReduceOp
from coordd.transport.shared_memory.board import INLINE_BYTES, LEGS
from coordd.transport.shared_memory.host_memory import Commons
from tests.neighbours import in_random_order, neighbours
from tests.transport.arithmetic import KINDS, expected, same_bits, values
from tests.transport.memories import Rank, dice, entered

Arrays = list[np.ndarray]
Steps = Generator[None, None, Any]

FLOAT = np.dtype(np.float32)
counts = st.integers(1, 5)
seeds = st.integers(0, 1 << 32)
chunks = st.sampled_from([64, 256, 4096, 1 << 20])
sizes = st.one_of(st.integers(0, 12), st.integers(0, 3000), st.integers(8000, 20_000))


def allreduce(
    world: Sequence[Commons],
    inputs: Sequence[Arrays],
    reduction: Reduction,
    *,
    chunk: int = 4096,
    seed: int = 0,
    resident: Callable[[], bool] = lambda: False,
    refusing: Sequence[int] = (),
    doubtful: bool = False,
    owners: int = 0,
    between: Callable[[Arrays], Steps] | None = None,
    stamp: int = 1,
) -> tuple[list[bool], list[Arrays]]:
    """Reduces each rank's arrays; returns what each rank says, and its arrays afterwards."""
    ranks = [Rank(commons, mine, resident) for commons, mine in zip(world, inputs, strict=True)]
    running = {}
    for me, rank in enumerate(ranks):
        meeting = rank.commons.meeting(7, stamp, world[0].ranks)
        terms = rank.terms(chunk, owners=owners, between=between)
        steps = direct.allreduce(meeting, rank.arrays, reduction, terms, doubtful=doubtful)
        running[me] = entered(meeting, None if me in refusing else steps)
    results = in_random_order(running, seed, ended=lambda me: ranks[me].end())
    assert all(rank.untouched for rank in ranks)
    return [results[me] for me in range(len(ranks))], [rank.found for rank in ranks]


@settings(deadline=None, max_examples=150)
@given(
    count=counts,
    kind=st.sampled_from(KINDS),
    data=st.data(),
    lengths=st.lists(sizes, min_size=1, max_size=4),
    chunk=chunks,
    resident=st.sampled_from([0.0, 0.5, 1.0]),
    seed=seeds,
)
def test_a_reduction_is_bitwise_the_sequential_one(*, count, kind, data, lengths, chunk, resident, seed):
    """Wherever the arrays lie, on each rank and for each array, and whether all ranks own slices or some."""
    dtype, ops = kind
    op = data.draw(st.sampled_from(ops))
    scaled = dtype.kind != "b"
    prescale = data.draw(st.sampled_from([1.0, 0.5, 1 / 3])) if scaled else 1.0
    postscale = data.draw(st.sampled_from([1.0, 0.3 if dtype.kind in "iu" else 3.0])) if scaled else 1.0
    owners = data.draw(st.integers(0, count))
    doubtful = data.draw(st.booleans())
    if sum(lengths) * dtype.itemsize > chunk * 200:
        chunk = 4096
    inputs = [[values(dtype, n, seed + 10 * rank + i) for i, n in enumerate(lengths)] for rank in range(count)]
    reduction = Reduction(op, dtype, prescale=prescale, postscale=postscale)
    with np.errstate(all="ignore"), neighbours(range(count)) as world:
        done, found = allreduce(
            world,
            inputs,
            reduction,
            chunk=chunk,
            seed=seed,
            resident=dice(seed, resident),
            owners=owners,
            doubtful=doubtful,
        )
        wanted = [expected([mine[i] for mine in inputs], op, prescale, postscale) for i in range(len(lengths))]
    assert all(done)
    for mine in found:
        assert all(same_bits(array, other) for array, other in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [2, 3])
def test_more_arrays_than_have_places_of_their_own(count, resident):
    legs = 2 * LEGS + 3
    inputs = [[values(FLOAT, 700 + i, 50 * rank + i) for i in range(legs)] for rank in range(count)]
    with neighbours(range(count)) as world:
        _, found = allreduce(world, inputs, Reduction(ReduceOp.SUM, FLOAT), resident=dice(1, resident), chunk=1024)
    for i in range(legs):
        wanted = expected([mine[i] for mine in inputs], ReduceOp.SUM)
        assert all(same_bits(mine[i], wanted) for mine in found)


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("resident", [0.0, 1.0])
@pytest.mark.parametrize("arrays", [1, 3])
def test_what_is_small_travels_in_the_slot_and_what_is_not_does_not(over, resident, arrays):
    """At the very boundary, alignment included; nothing may run over into the next slot."""
    room = INLINE_BYTES // 16 - arrays  # each array takes its bytes and one alignment
    lengths = [(room * 4 - 4 * (arrays - 1) + over) if i == 0 else 4 for i in range(arrays)]
    inputs = [[values(FLOAT, n, 9 * rank + i) for i, n in enumerate(lengths)] for rank in range(3)]
    with neighbours(range(3)) as world:
        for commons in world:
            commons.mine.inline(8)[:] = b"\5" * INLINE_BYTES
        lent = []
        for commons in world:
            commons.borrow = lambda size, borrow=commons.borrow: lent.append(size) or borrow(size)
        _, found = allreduce(world, inputs, Reduction(ReduceOp.SUM, FLOAT), resident=dice(1, resident))
        assert all(set(commons.mine.inline(8)) == {5} for commons in world)
    assert bool(lent) == (over > 0 and not resident)
    for i in range(arrays):
        wanted = expected([mine[i] for mine in inputs], ReduceOp.SUM)
        assert all(same_bits(mine[i], wanted) for mine in found)


def test_bfloat16_is_added_in_fp32():
    """In bfloat16 each 1 would vanish beside 256."""
    dtype = next(dtype for dtype, _ in KINDS if dtype.name == "bfloat16")
    for size in (3, 40_000):
        inputs = [[np.full(size, value, dtype)] for value in (256, 1, 1)]
        with neighbours(range(3)) as world:
            _, found = allreduce(world, inputs, Reduction(ReduceOp.SUM, dtype))
        assert all((array.astype(float) == 258.0).all() for (array,) in found)


@settings(deadline=None, max_examples=100)
@given(
    count=st.integers(2, 5),
    lengths=st.lists(sizes, min_size=1, max_size=3),
    prescale=st.sampled_from([1.0, 1 / 3]),
    resident=st.sampled_from([0.0, 0.5, 1.0]),
    data=st.data(),
    chunk=chunks,
    seed=seeds,
)
@example(count=2, lengths=[20_000], prescale=1 / 3, resident=1.0, data=None, chunk=4096, seed=1)
@example(count=3, lengths=[20_000], prescale=1.0, resident=1.0, data=None, chunk=64, seed=2)
def test_one_rank_that_will_not_keeps_everybodys_inputs_as_they_are(
    *, count, lengths, prescale, resident, data, chunk, seed
):
    """Bit for bit, and all ranks say the same; a later operation in the same slot is none the worse."""
    refusing = data.draw(st.sets(st.integers(0, count - 1), min_size=1)) if data else {count - 1}
    inputs = [[values(FLOAT, n, seed + 10 * rank + i) for i, n in enumerate(lengths)] for rank in range(count)]
    reduction = Reduction(ReduceOp.AVERAGE, FLOAT, prescale=prescale)
    with neighbours(range(count)) as world:
        options = {"chunk": max(chunk, sum(lengths) // 50), "resident": dice(seed, resident), "doubtful": True}
        done, found = allreduce(world, inputs, reduction, seed=seed, refusing=refusing, **options)
        again, _ = allreduce(world, inputs, reduction, seed=seed, stamp=2, **options)
    assert not any(done)
    assert all(again)
    for mine, given_ in zip(found, inputs, strict=True):
        assert all(same_bits(array, other) for array, other in zip(mine, given_, strict=True))


@settings(deadline=None, max_examples=60)
@given(
    count=counts,
    lengths=st.lists(sizes, min_size=1, max_size=3),
    owners=st.integers(1, 5),
    chunk=chunks,
    resident=st.sampled_from([0.0, 0.5, 1.0]),
    seed=seeds,
)
def test_between_hosts_every_element_travels_once(*, count, lengths, owners, chunk, resident, seed):
    """The other hosts add one; a slice that is dropped, sent twice or sent too late shows."""
    inputs = [[np.full(n, 1 << rank, np.int64) for n in lengths] for rank in range(count)]
    order, calls = random.Random(seed), []

    def between(slices: Arrays) -> Steps:
        calls.append(sum(piece.size for piece in slices))
        for _ in range(order.choice([0, 1, 5])):
            yield
        for piece in slices:
            np.add(piece, 1, out=piece)

    with neighbours(range(count)) as world:
        _, found = allreduce(
            world,
            inputs,
            Reduction(ReduceOp.SUM, np.dtype(np.int64)),
            chunk=max(chunk, sum(lengths) // 25),
            seed=seed,
            resident=dice(seed, resident),
            owners=min(owners, count),
            between=between,
        )
    assert all((array == (1 << count)).all() for mine in found for array in mine)
    assert sum(calls) == sum(lengths)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(2, 4),
    operations=st.lists(st.tuples(st.integers(0, 31), st.integers(0, 20_000), st.booleans()), min_size=1, max_size=14),
    slots=st.integers(1, 4),
    seed=seeds,
)
def test_operations_in_flight_do_not_mix_and_slots_are_used_again(*, count, operations, slots, seed):
    """Several at a time, of overlapping sets of ranks, in one order; small and large ones, reduced or refused."""
    source = random.Random(seed)
    with neighbours(range(count)) as world:
        running, ranks, wanted = {}, {}, {}
        for number, (choice, size, willing) in enumerate(operations):
            members = tuple(rank for rank in range(count) if choice >> rank & 1) or tuple(range(count))
            inputs = {rank: values(FLOAT, size, seed + 99 * number + rank) for rank in members}
            refusing = None if willing else source.choice(members)
            wanted[number] = expected(list(inputs.values()), ReduceOp.SUM) if willing else None
            for rank in members:
                mine = ranks[number, rank] = Rank(world[rank], [inputs[rank]], dice(source.random(), 0.5))
                meeting = world[rank].meeting(number % slots, number + 1, members)
                steps = direct.allreduce(
                    meeting, mine.arrays, Reduction(ReduceOp.SUM, FLOAT), mine.terms(4096), doubtful=True
                )
                running[number, rank] = entered(meeting, None if rank == refusing else steps)
        done = in_random_order(running, seed, ended=lambda key: ranks[key].end())
    for (number, rank), mine in ranks.items():
        assert done[number, rank] == (wanted[number] is not None)
        if wanted[number] is not None:
            assert same_bits(mine.found[0], wanted[number])
        assert mine.untouched
