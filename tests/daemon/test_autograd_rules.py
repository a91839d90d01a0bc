"""Operations that autograd can go through, on plain arrays."""

from __future__ import annotations

import numpy as np
import pytest

from coordd import api
from coordd.daemon.autograd_rules import Allgather, Allreduce, Alltoall, Broadcast, Reducescatter
from coordd.errors import ArgumentError
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set
from tests.local_ranks import each_rank

RANKS = 3


def both(operation, arrays, gradients):
    """Results, and what comes of their gradients."""
    results, kept = operation.forward(*arrays)
    return [array.tolist() for array in results], [array.tolist() for array in operation.backward(kept, *gradients)]


def test_allreduce():
    def body(rank):
        mine = np.array([rank + 1.0, 0.0])
        found = both(Allreduce(api.source(), ["a"], global_process_set, op=ReduceOp.SUM), [mine], [mine])
        assert mine.tolist() == [rank + 1.0, 0.0]
        return found

    assert each_rank(RANKS, body) == [([[6.0, 0.0]], [[6.0, 0.0]])] * RANKS


def test_allreduce_of_several_with_factors():
    def body(rank):
        operation = Allreduce(
            api.source(), [None, None], global_process_set, op=ReduceOp.AVERAGE, prescale=2.0, postscale=0.5
        )
        return both(operation, [np.array(3.0 * rank), np.ones(1)], [np.array(1.0), np.ones(1)])

    assert each_rank(RANKS, body) == [([3.0, [1.0]], [1.0, [1.0]])] * RANKS


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_what_is_not_linear_is_refused(op):
    def body(rank):
        for kind in (Allreduce, Reducescatter):
            with pytest.raises(ArgumentError, match="has no gradient here"):
                kind(api.source(), [None], global_process_set, op=op).check()

    each_rank(1, body)


def test_allgather():
    def body(rank):
        mine = np.full((rank, 1), float(rank))  # rank 0 has no rows
        upstream = np.arange(3.0)[:, None] * (rank + 1)
        return both(Allgather(api.source(), ["a"], global_process_set), [mine], [upstream])

    results, gradients = zip(*each_rank(RANKS, body), strict=True)
    assert results == ([[[1.0], [2.0], [2.0]]],) * RANKS
    assert gradients == ([[]], [[[0.0]]], [[[2.0], [4.0]]])


def test_broadcast():
    def body(rank):
        operation = Broadcast(api.source(), ["a"], global_process_set, root=1)
        return both(operation, [np.array([float(rank)])], [np.array([rank + 1.0])])

    assert each_rank(RANKS, body) == [([[1.0]], [[0.0]]), ([[1.0]], [[2.0]]), ([[1.0]], [[0.0]])]


def test_alltoall():
    def body(rank):
        mine = np.arange(4.0) + 10 * rank  # the last row goes nowhere
        splits = np.array([1, 1, 1])
        operation = Alltoall(api.source(), ["a"], global_process_set)
        results, kept = operation.forward(mine, splits)
        return results[0].tolist(), kept.tolist(), operation.backward(kept, np.full(3, rank + 1.0))[0].tolist()

    for rank, (rows, kept, gradient) in enumerate(each_rank(RANKS, body)):
        assert rows == [rank, 10.0 + rank, 20.0 + rank]
        assert kept == [[1, 1, 1], [1, 1, 1], [4, 4, 4]]
        assert gradient == [1.0, 2.0, 3.0, 0.0]


def test_reducescatter():
    def body(rank):
        operation = Reducescatter(api.source(), ["a"], global_process_set, op=ReduceOp.SUM, prescale=2.0)
        results, kept = operation.forward(np.arange(4.0))
        return results[0].tolist(), operation.backward(kept, np.full(len(results[0]), rank + 1.0))[0].tolist()

    parts = [[0.0, 6.0], [12.0], [18.0]]
    assert each_rank(RANKS, body) == [(part, [6.0, 6.0, 12.0, 18.0]) for part in parts]


def test_on_some_ranks():
    def body(rank):
        some = ProcessSet([0, 2])
        if rank == 1:
            return None
        return both(Allgather(api.source(), ["a"], some), [np.array([float(rank)])], [np.array([1.0, 3.0])])

    assert each_rank(RANKS, body) == [([[0.0, 2.0]], [[1.0]]), None, ([[0.0, 2.0]], [[3.0]])]
