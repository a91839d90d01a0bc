"""Sparse gradients of an optimizer, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank, local_ranks
from tests.torch_plugin.training import WAYS

COUNT = 3
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def table() -> nn.Embedding:
    made = nn.Embedding(6, 2, sparse=True)
    with torch.no_grad():
        made.weight.copy_(torch.arange(12.0).reshape(6, 2) / 7)
    return made


def rows(rank: int, step: int) -> list[int]:
    """What a rank looks up; sometimes nothing, sometimes the same twice."""
    return [[], [step % 6, 3, 3], [5, step % 2]][(rank + step) % 3]


def distributed(made: nn.Embedding, **more: Any) -> Any:
    return cd.DistributedOptimizer(torch.optim.SGD(made.parameters(), lr=1.0), made.named_parameters(), **more)


def assert_lowered(body: Callable[[int], torch.Tensor], amounts: dict[int, float]) -> None:
    """The table that each of two ranks ends with is lower by so much in these rows."""
    wanted = table().weight.detach()
    for row, amount in amounts.items():
        wanted[row] -= amount
    for found in each_rank(2, body):
        torch.testing.assert_close(found, wanted)


def loss(made: nn.Embedding, rank: int, step: int) -> torch.Tensor:
    return made(torch.tensor(rows(rank, step), dtype=torch.int64)).square().sum()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("op", [cd.Average, cd.Sum, cd.AveragePresent])
def test_training_is_that_of_one_process(make, way, op):
    def body(rank):
        made = table()
        optimizer = cd.DistributedOptimizer(make(made.parameters(), lr=0.1), made.named_parameters(), op=op)
        for step in range(5):
            optimizer.zero_grad()
            loss(made, rank, step).backward()
            assert made.weight.grad.is_sparse
            optimizer.step()
        return made.weight.detach()

    alone = table()
    optimizer = make(alone.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        (sum(loss(alone, rank, step) for rank in range(COUNT)) / (1 if op is cd.Sum else COUNT)).backward()
        optimizer.step()
    for found in each_rank(COUNT, body, **way):
        torch.testing.assert_close(found, alone.weight.detach())


def test_a_rank_may_have_no_gradient_at_all_and_all_may():
    def body(rank):
        made, head = table(), nn.Linear(1, 1)
        cd.broadcast_parameters(head.state_dict())
        named = [("table", made.weight), *head.named_parameters()]
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([value for _, value in named], lr=1.0), named)
        for step in range(4):
            optimizer.zero_grad()
            total = head(torch.ones(1)).sum()
            if step == 0 or (step % 2 == 0 and rank == 1):
                total = total + made(torch.tensor([rank])).sum()
            total.backward()
            assert (made.weight.grad is None) == (step % 2 == 1)
            optimizer.step()
        return made.weight.detach()

    assert_lowered(body, {0: 0.5, 1: 1.0})


def test_several_passes_are_added_up_before():
    def body(rank):
        made = table()
        optimizer = distributed(made, backward_passes_per_step=2)
        for index in (rank, 4):
            made(torch.tensor([index])).sum().backward()
        optimizer.step()
        return made.weight.detach()

    assert_lowered(body, {0: 0.5, 1: 0.5, 4: 1.0})


def test_ranks_that_join_have_no_rows():
    def body(rank):
        made = table()
        optimizer = distributed(made)
        for _ in range(1 + rank):
            optimizer.zero_grad()
            made(torch.tensor([rank])).sum().backward()
            optimizer.step()
        optimizer.join()
        return made.weight.detach()

    assert_lowered(body, {0: 0.5, 1: 1.0})


def test_what_cannot_be_combined_is_refused():
    def body(_):
        distributed(table(), op=cd.Max)

    with local_ranks(2) as ranks:
        for error in ranks.errors(body, cd.ArgumentError):
            assert "op=Max" in str(error)


def test_sparse_here_and_dense_there_is_an_error_everywhere():
    def body(rank):
        made = table()
        made.sparse = rank == 0
        optimizer = distributed(made)
        made(torch.tensor([0])).sum().backward()
        optimizer.step()

    with local_ranks(2) as ranks:
        for error in ranks.errors(body, cd.MismatchError):
            assert "allgather" in str(error)


def test_what_was_sparse_may_be_dense_later():
    def body(rank):
        made = table()
        optimizer = distributed(made)
        for sparse in (True, False, False, True):
            made.sparse = sparse
            optimizer.zero_grad()
            made(torch.tensor([rank])).sum().backward()
            optimizer.step()
        return made.weight.detach()

    assert_lowered(body, {0: 4 * 0.5, 1: 4 * 0.5})


def row_of(table, rank, *, second):
    """What a rank computes with; in the second pass rank 0 alone uses the table."""
    if not second:
        return table(torch.tensor([0, 1])) + rank
    return torch.ones(1, 2) if rank else table(torch.tensor([2]))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_a_rank_that_adds_nothing_takes_part_with_what_it_has(sparse, clears):
    """In a second backward pass, or in a step that goes on from the gradients of the one before."""

    def body(rank, count=2):
        table = nn.Embedding(4, 2, sparse=sparse, _weight=torch.arange(8.0).reshape(4, 2) / 8)
        layer = nn.Linear(2, 1)
        with torch.no_grad():
            layer.weight.fill_(0.5)
            layer.bias.fill_(0.1)
        parameters = [table.weight, *layer.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        ranks = range(2) if count == 1 else [rank]
        if count == 2:
            optimizer = cd.DistributedOptimizer(optimizer)
        for step in range(4):
            if clears:
                optimizer.zero_grad()
            for number in range(2) if clears else [step % 2]:
                rows = [row_of(table, each, second=bool(number)) for each in ranks]
                sum(layer(row).square().mean() for row in rows).div(len(rows)).backward()
            optimizer.step()
        return [value.detach().clone() for value in parameters]

    wanted = body(0, count=1)
    for found in each_rank(2, body):
        torch.testing.assert_close(found, wanted)
