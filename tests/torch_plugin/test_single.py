"""An allreduce of its own that is compressed."""

from __future__ import annotations

import math

import pytest
import torch

import coordd.torch as cd
from tests.local_ranks import each_rank

INT8 = cd.Compression.int8


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [cd.Sum, cd.Average, cd.AveragePresent])
def test_it_is_nearly_the_reduction(ranks, dtype, op):
    found = each_rank(
        ranks, lambda rank: cd.allreduce(mine(rank, 30, 11, dtype=dtype), op=op, compression=INT8, name="x")
    )
    wanted = sum(mine(rank, 30, 11, dtype=dtype).double() for rank in range(ranks)) / (1 if op is cd.Sum else ranks)
    for tensor in found:
        assert tensor.dtype == dtype
        assert torch.equal(tensor, found[0])
        torch.testing.assert_close(tensor.double(), wanted, rtol=0.02, atol=0.03 * ranks)


def test_factors_and_process_sets_and_groups_are_those_of_every_allreduce():
    def body(rank):
        if rank == 1:
            return None
        return cd.grouped_allreduce(
            [mine(rank, 40), torch.tensor([rank, 7]), mine(rank, 0)],
            op=cd.Sum,
            compression=INT8(),
            prescale_factor=1.0,
            postscale_factor=1.0,
            process_set=cd.ProcessSet([0, 2]),
        )

    zero, _, two = each_rank(3, body)
    for floats, integers, nothing in (zero, two):
        torch.testing.assert_close(floats, mine(0, 40) + mine(2, 40), rtol=0, atol=0.05)
        assert integers.tolist() == [2, 14], "integers travel as they are"
        assert nothing.shape == (0,)
    scaled = each_rank(
        2, lambda rank: cd.allreduce(torch.ones(3), compression=INT8, prescale_factor=4.0, postscale_factor=0.5)
    )
    assert all(torch.allclose(tensor, torch.full((3,), 2.0)) for tensor in scaled)


def test_gradients_pass_through():
    def body(rank):
        tensor = mine(rank, 6).requires_grad_()
        (cd.allreduce(tensor, compression=INT8) * (rank + 1)).sum().backward()
        return tensor.grad.tolist()

    assert each_rank(2, body) == [[1.5] * 6] * 2


def test_what_is_not_finite_is_not_on_any_rank():
    def body(rank):
        tensor = mine(rank, 5)
        tensor[2] = math.inf if rank else 0.0
        return cd.allreduce(tensor, compression=INT8)

    for tensor in each_rank(2, body):
        assert not torch.isfinite(tensor).any()


@pytest.mark.parametrize("compression", [cd.Compression.topk, cd.Compression.powersgd(rank=1)])
def test_what_sends_the_rest_later_is_refused(compression):
    def body(_):
        with pytest.raises(cd.ArgumentError, match="an allreduce has no later step: use it in DistributedOptimizer"):
            cd.allreduce(torch.ones(3), compression=compression)
        with pytest.raises(cd.ArgumentError, match="reduces whole tensors"):
            cd.reducescatter(torch.ones(4), compression=compression)

    each_rank(1, body)


def test_a_maximum_cannot_be_had_of_means():
    def body(_):
        with pytest.raises(cd.ArgumentError, match="makes sums and averages, not Max"):
            cd.allreduce(torch.ones(3), op=cd.Max, compression=INT8)

    each_rank(1, body)
