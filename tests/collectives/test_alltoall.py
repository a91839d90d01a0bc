"""Exchanges over a lane, and Adasum, which is made of them; all ranks in one thread, in a random order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordd.collectives.adasum import adasum, weights
from coordd.collectives.alltoall import counts, exchange, reduce_scatter
from coordd.collectives.ring import Reduction
from coordd.ops.messages import ReduceOp
from tests.collectives.test_ring import drive
from tests.transport.arithmetic import KINDS, expected, same_bits, values

seeds = st.integers(0, 1 << 32)
chunks = st.sampled_from([1, 7, 64, 256, 4096])
BYTES = np.dtype(np.uint8)


@settings(deadline=None)
@given(
    table=st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 500), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    chunk=chunks,
    seed=seeds,
)
def test_each_pair_exchanges_as_much_as_it_likes(table, chunk, seed):
    size = len(table)
    sent = [[values(BYTES, table[me][to], seed + 9 * me + to) for to in range(size)] for me in range(size)]
    got = [[np.zeros(table[source][me], np.uint8) for source in range(size)] for me in range(size)]
    drive(lambda group: exchange(group, sent[group.me], got[group.me]), range(size), chunk=max(chunk, 5), seed=seed)
    for me, source in itertools.permutations(range(size), 2):
        assert same_bits(got[me][source], sent[source][me])


@given(st.integers(1, 5), seeds)
def test_counts_reach_whom_they_are_for(size, seed):
    told = [np.arange(size) + 10 * me for me in range(size)]
    heard = [line.copy() for line in told]
    drive(lambda group: counts(group, told[group.me], heard[group.me]), range(size), chunk=64, seed=seed)
    assert np.array_equal(np.stack(heard), np.stack(told).T)


@np.errstate(all="ignore")
@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS), lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5), chunk=chunks, seed=seeds
)
def test_each_gets_the_reduction_of_his_slice_and_nobody_s_array_changes(kind, lengths, chunk, seed):
    dtype, operations = kind
    for op in operations:
        given_ = [values(dtype, sum(lengths), seed + rank) for rank in range(len(lengths))]
        mine = [array.copy() for array in given_]
        edges = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
        results = [np.empty(length, dtype) for length in lengths]

        def operation(group, mine=mine, edges=edges, results=results, op=op):
            slices = [mine[group.me][start:stop] for start, stop in edges]
            return reduce_scatter(group, slices, results[group.me], Reduction(op, dtype))

        drive(operation, range(len(lengths)), chunk=max(chunk, 64), seed=seed)
        for me, (start, stop) in enumerate(edges):
            assert same_bits(results[me], expected(given_, op)[start:stop])
            assert same_bits(mine[me], given_[me])


def pairwise(vectors):
    """Adasum as the paper writes it, two gradients at a time."""
    vectors = [vector.astype(np.float64) for vector in vectors]
    while len(vectors) > 1:
        pairs = [vectors[at : at + 2] for at in range(0, len(vectors), 2)]
        vectors = [pair[0] if len(pair) == 1 else adaptive(*pair) for pair in pairs]
    return vectors[0]


def adaptive(left, right):
    both = left @ right
    kept = [1 - both / (2 * (one @ one)) if one.any() else 1.0 for one in (left, right)]
    return kept[0] * left + kept[1] * right


@settings(deadline=None)
@given(
    count=st.integers(1, 7),
    size=st.integers(1, 60),
    dtype=st.sampled_from([np.float64, np.float32, np.float16]),
    zero=st.integers(0, 9),
    chunk=chunks,
    seed=seeds,
)
@example(count=3, size=2, dtype=np.float64, zero=1, chunk=64, seed=0)
def test_adasum_of_any_number_of_ranks_is_that_of_pairs_of_pairs(*, count, size, dtype, zero, chunk, seed):
    source = np.random.default_rng(seed)
    given_ = [(source.normal(size=size) * (me != zero)).astype(dtype) for me in range(count)]
    mine = [vector.copy() for vector in given_]
    drive(
        lambda group: adasum(group, mine[group.me], prescale=1.0, postscale=1.0),
        range(count),
        chunk=max(chunk, 64),
        seed=seed,
    )
    loose = {np.float64: 1e-9, np.float32: 2e-4, np.float16: 5e-2}[dtype]
    for found in mine:
        assert same_bits(found, mine[0])
        np.testing.assert_allclose(found.astype(np.float64), pairwise(given_), rtol=loose, atol=loose)


def test_adasum_averages_what_is_parallel_and_adds_what_is_orthogonal():
    assert weights(np.ones((4, 4))) == pytest.approx([0.25] * 4)
    assert weights(np.eye(5)) == pytest.approx([1.0] * 5)
    assert weights(np.zeros((3, 3))) == pytest.approx([1.0] * 3)


def test_adasum_scales_before_and_after():
    mine = [np.array([1.0, 0.0]), np.array([0.0, 2.0])]
    drive(lambda group: adasum(group, mine[group.me], prescale=3.0, postscale=10.0), range(2), chunk=64, seed=0)
    assert [array.tolist() for array in mine] == [[30.0, 60.0]] * 2


def test_the_number_of_adasum_is_horovod_s():
    assert ReduceOp.ADASUM == 2
