"""Autograd through the operations: gradients of the mean over the ranks of the loss."""

from __future__ import annotations

import pytest
import torch

import coordd.torch as cd
from tests.local_ranks import each_rank, local_ranks


def leaf(rank: int, *shape: int, offset: float = 0.0) -> torch.Tensor:
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) + offset
    return values.requires_grad_()


def mean_of_losses(count, loss, make):
    """What one process that holds all leaves would find."""
    leaves = [make(rank) for rank in range(count)]
    total = sum(loss(rank, leaves) for rank in range(count)) / count
    return torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("op", [cd.Average, cd.Sum])
def test_allreduce_has_the_same_reduction_as_its_gradient(count, op):
    weights = [torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + rank for rank in range(count)]

    def body(rank):
        mine = leaf(rank, 2, 3)
        (weights[rank] * cd.allreduce(mine, op=op)).sum().backward()
        grouped = [leaf(rank, 2, 3), leaf(rank, 2, 3)]
        first, _ = cd.grouped_allreduce(grouped, op=op)
        (weights[rank] * first).sum().backward()  # the other has no part in the loss, on any rank
        assert torch.equal(grouped[0].grad, mine.grad)
        assert not grouped[1].grad.any()
        return mine.grad

    total = sum(weights) / (count if op is cd.Average else 1)
    for found in each_rank(count, body):
        torch.testing.assert_close(found, total)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_allgather_gives_each_rank_the_gradient_of_its_rows(count):
    def make(rank):
        return leaf(rank, rank % 3, 2)

    def loss(rank, gathered):
        return (gathered**2).sum() * (rank + 1)

    def body(rank):
        mine, twins = make(rank), [make(rank), make(rank)]
        loss(rank, cd.allgather(mine)).backward()
        first, second = cd.grouped_allgather(twins, name="twins")
        (loss(rank, first) + 3 * loss(rank, second)).backward()
        torch.testing.assert_close(twins[0].grad, mine.grad)
        torch.testing.assert_close(twins[1].grad, 3 * mine.grad)
        return mine.grad

    wanted = mean_of_losses(count, lambda rank, leaves: loss(rank, torch.cat(leaves)), make)
    for found, other in zip(each_rank(count, body), wanted, strict=True):
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_broadcast_gives_the_gradient_to_the_root(count):
    root = count - 1

    def body(rank):
        mine = leaf(rank, 3)
        (cd.broadcast(mine, root) ** 2).sum().mul(rank + 1).backward()
        return mine.grad

    wanted = mean_of_losses(
        count, lambda rank, leaves: (leaves[root] ** 2).sum() * (rank + 1), lambda rank: leaf(rank, 3)
    )
    for rank, found in enumerate(each_rank(count, body)):
        torch.testing.assert_close(found, wanted[root] if rank == root else torch.zeros(3, dtype=torch.float64))


def test_scale_factors_and_process_sets_hold_in_backward_too():
    pair = cd.ProcessSet([0, 2])

    def body(rank):
        if rank == 1:
            return None
        mine = leaf(rank, 2)
        reduced = cd.allreduce(mine, op=cd.Sum, prescale_factor=0.5, postscale_factor=3.0, process_set=pair)
        gathered = cd.allgather(mine, process_set=pair)
        (reduced.sum() + 10 * gathered.sum() + 100 * cd.broadcast(mine, 2, process_set=pair).sum()).backward()
        return mine.grad.tolist()

    assert each_rank(3, body) == [[13.0, 13.0], None, [113.0, 113.0]]


def test_gradients_of_different_operations_are_never_mixed():
    """The loss of each rank uses another output; as the shapes are equal, the sum would be silently wrong."""

    def body(rank):
        leaves = {name: leaf(rank, 3) for name in "ab"}
        outputs = {name: cd.allreduce(leaves[name], name=name) for name in "ab"}
        with pytest.raises(cd.PeerError, match=r"rank [01] kept '[ab]\.grad' waiting for"):
            outputs["ab"[rank]].sum().backward()

    with local_ranks(2, stall_seconds=0.1, stall_abort_seconds=0.2) as ranks:
        ranks.each(body)


@pytest.mark.parametrize("op", [cd.Min, cd.Max, cd.Product])
def test_operations_without_a_gradient_say_so(op):
    def body(rank):
        mine = leaf(rank, 2)
        found = cd.allreduce(mine, op=op)
        with pytest.raises(
            cd.ArgumentError, match=f"{op.name.capitalize()} has no gradient here: reduce tensor.detach()"
        ):
            found.sum().backward()
        return cd.allreduce(mine.detach(), op=op).requires_grad

    assert each_rank(2, body) == [False, False]


def test_gradients_can_be_differentiated_again():
    def body(rank):
        mine = leaf(rank, 2)
        (first,) = torch.autograd.grad((cd.allreduce(mine) ** 3).sum(), mine, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), mine)
        return mine.detach(), second

    results = each_rank(2, body)
    mean = sum(mine for mine, _ in results) / 2
    for _, second in results:
        torch.testing.assert_close(second, 6 * mean)


def test_compression_is_differentiable():
    def body(rank):
        mine = leaf(rank, 2).float().detach().requires_grad_()
        (cd.allreduce(mine, compression=cd.Compression.fp16) * 2).sum().backward()
        return mine.grad

    for found in each_rank(2, body):
        assert torch.equal(found, torch.full((2,), 2.0))


def test_results_without_a_gradient_need_none():
    def body(rank):
        plain = torch.ones(2)
        return [
            found.requires_grad
            for found in (
                cd.allreduce(plain),
                cd.allgather(plain),
                cd.broadcast(plain, 0),
                *cd.grouped_allreduce([plain]),
            )
        ]

    assert each_rank(2, body) == [[False] * 4] * 2


def test_gradcheck():
    def body(rank):
        mine = leaf(0, 2, 2)  # equal on all ranks, so that all ask for the same differences
        return torch.autograd.gradcheck(lambda x: cd.allreduce(x * x, op=cd.Average), (mine,))

    assert each_rank(1, body) == [True]
