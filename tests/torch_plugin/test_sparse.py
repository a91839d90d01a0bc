"""Sums of sparse tensors, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

import coordd.torch as cd
from tests.local_ranks import each_rank


def embedding_gradient(rank: int) -> torch.Tensor:
    """Rank 0 has nothing; an index may come twice."""
    rows = [1, 1, rank][:rank]
    return torch.sparse_coo_tensor([rows], torch.ones(len(rows), 2) * (rank + 1), (4, 2), check_invariants=False)


@pytest.mark.parametrize("op", [None, cd.Sum])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_it_is_the_sum_of_the_dense_ones(count, op):
    def body(rank):
        handle = cd.sparse_allreduce_async(embedding_gradient(rank), name="w", op=op)
        assert cd.synchronize(handle).is_sparse
        assert handle.poll()
        return handle().to_dense()

    total = sum(embedding_gradient(rank).to_dense() for rank in range(count))
    for found in each_rank(count, body):
        torch.testing.assert_close(found, total if op is cd.Sum else total / count)


def test_what_is_dense_or_has_no_meaning_is_refused():
    def body(_):
        with pytest.raises(cd.ArgumentError, match="use allreduce"):
            cd.sparse_allreduce_async(torch.ones(2))
        with pytest.raises(cd.ArgumentError, match="Sum or Average"):
            cd.sparse_allreduce_async(torch.ones(2).to_sparse(), op=cd.Max)

    each_rank(1, body)
