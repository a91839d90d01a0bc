"""Operations in rounds, all ranks of a host in one thread, in a random order that the seed decides."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordd.collectives import stepwise
from coordd.collectives.ring import Reduction
from tests.neighbours import in_random_order, neighbours
from tests.transport.arithmetic import KINDS, expected, pieces, same_bits, values
from tests.transport.memories import Rank, dice, entered

seeds = st.integers(0, 1 << 32)
chunks = st.sampled_from([64, 256, 4096, 1 << 20])
sizes = st.one_of(st.integers(0, 12), st.integers(0, 3000), st.integers(8000, 20_000))


@settings(deadline=None, max_examples=80)
@given(st.lists(sizes, min_size=1, max_size=5), chunks, seeds)
@example([0, 0, 0], 64, 0)
@example([0, 100_000, 1], 16 << 10, 0)
def test_blocks_of_any_size_are_spread(lengths, chunk, seed):
    chunk = max(chunk, max(lengths) // 100)
    given_, blocks = pieces(lengths, seed)
    with neighbours(range(len(lengths))) as world:
        ranks, running = [], {}
        for me, commons in enumerate(world):
            rank = Rank(commons, blocks[me], dice(seed + me, 0.5))
            meeting = commons.meeting(0, 1, commons.ranks)
            running[me] = entered(meeting, stepwise.spread(meeting, rank.arrays, rank.terms(chunk)))
            ranks.append(rank)
        in_random_order(running, seed, ended=lambda me: ranks[me].end())
        assert all(rank.untouched for rank in ranks)
    for rank in ranks:
        assert all(same_bits(block, wanted) for block, wanted in zip(rank.found, given_, strict=True))


@settings(deadline=None, max_examples=80)
@given(count=st.integers(1, 5), row=st.integers(0, 40), chunk=chunks, seed=seeds, data=st.data())
def test_everybody_gets_his_rows_of_everybody(*, count, row, chunk, seed, data):
    table = data.draw(
        st.lists(st.lists(st.integers(0, 60), min_size=count, max_size=count), min_size=count, max_size=count)
    )
    spare = data.draw(st.integers(0, 3))
    given_ = [values(np.dtype(np.uint8), (sum(line) + spare) * row, seed + rank) for rank, line in enumerate(table)]
    with neighbours(range(count)) as world:
        ranks, running = [], {}
        for me, commons in enumerate(world):
            rank = Rank(commons, [given_[me]], dice(seed + me, 0.5))
            meeting = commons.meeting(0, 1, commons.ranks)
            steps = stepwise.alltoall(meeting, rank.arrays[0], table[me], row, rank.terms(chunk))
            running[me] = entered(meeting, steps)
            ranks.append(rank)
        found = in_random_order(running, seed)
        for me, (received, parts) in found.items():
            assert received == [line[me] for line in table]
            for sender, part in enumerate(parts):
                start = sum(table[sender][:me]) * row
                assert same_bits(part, given_[sender][start : start + received[sender] * row])


@np.errstate(all="ignore")
@settings(deadline=None, max_examples=120)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(sizes, min_size=1, max_size=5),
    chunk=chunks,
    seed=seeds,
    data=st.data(),
)
@example(kind=KINDS[1], lengths=[0, 0], chunk=64, seed=0, data=None)
@example(kind=KINDS[-3], lengths=[3, 2, 2, 2], chunk=64, seed=0, data=None)
def test_everybody_gets_the_reduction_of_his_slice(*, kind, lengths, chunk, seed, data):
    dtype, operations = kind
    op = operations[0] if data is None else data.draw(st.sampled_from(operations))
    scales = {"prescale": 0.5, "postscale": 0.75} if data and dtype.kind != "b" and data.draw(st.booleans()) else {}
    given_ = [values(dtype, sum(lengths), seed + rank) for rank in range(len(lengths))]
    wanted = expected(given_, op, *scales.values())
    edges = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    with neighbours(range(len(lengths))) as world:
        running, results, mine = {}, {}, [array.copy() for array in given_]
        for me, commons in enumerate(world):
            meeting = commons.meeting(0, 1, commons.ranks)
            slices = [mine[me][start:stop] for start, stop in edges]
            results[me] = np.empty(lengths[me], dtype)
            reduction = Reduction(op, dtype, **scales)
            terms = Rank(commons, [], lambda: False).terms(chunk)
            running[me] = entered(meeting, stepwise.reduce_scatter(meeting, slices, results[me], reduction, terms))
        in_random_order(running, seed)
    for me, (start, stop) in enumerate(edges):
        assert same_bits(results[me], wanted[start:stop])
        assert same_bits(mine[me], given_[me])
