"""Operations along the first dimension, Adasum and sparse sums, against what a single process computes."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import coordd.torch as cd
from tests.mpi.cases import EVERY, ranks
from tests.mpi.cases_allreduce import OPERATIONS
from tests.mpi.reference import everyones, mine, reduced


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return torch.tensor_split(tensor, cd.size())[cd.rank()]


@ranks(*EVERY)
def case_reducescatter_of_every_type_under_every_operation() -> None:
    for dtype, operations in OPERATIONS.items():
        for op in operations:
            result = cd.reducescatter(mine(dtype), op=op)
            assert result.dtype == dtype
            assert_close(result, scattered(reduced(everyones(dtype), op)))


@ranks(*EVERY)
def case_reducescatter_of_any_shape() -> None:
    for shape in [(0, 3), (1,), (7, 2), (3, 0), (50_001, 5)]:
        tensors = mine(torch.int64, shape), mine(torch.int64, shape, seed=1)
        found = cd.grouped_reducescatter(tensors, name="g", op=cd.Sum)
        for seed, result in enumerate(found):
            assert torch.equal(result, scattered(reduced(everyones(torch.int64, shape, seed=seed))))


@ranks(*EVERY)
def case_gradients_of_reducescatter_and_alltoall() -> None:
    tensor = mine(torch.float64, (8, 2)).requires_grad_()
    (cd.reducescatter(tensor, op=cd.Average) * (cd.rank() + 1)).sum().backward()
    wanted = [torch.full((len(rows), 2), rank + 1.0) for rank, rows in enumerate(torch.ones(8).tensor_split(cd.size()))]
    assert torch.equal(tensor.grad, torch.cat(wanted).double())
    tensor = mine(torch.float64, (2 * cd.size(), 2)).requires_grad_()
    (cd.alltoall(tensor) * (cd.rank() + 1)).sum().backward()
    assert tensor.grad.tolist() == [[rank + 1.0] * 2 for rank in range(cd.size()) for _ in range(2)]


@ranks(*EVERY)
def case_alltoall_of_every_type_with_uneven_splits() -> None:
    table = [[(3 * me + 5 * to) % 4 for to in range(cd.size())] for me in range(cd.size())]
    for dtype in OPERATIONS:
        inputs = [tensor[: sum(table[rank])] for rank, tensor in enumerate(everyones(dtype, (16, 3)))]
        rows, received = cd.alltoall(inputs[cd.rank()], torch.tensor(table[cd.rank()]), name=f"a.{dtype}")
        parts = [tensor.split(table[rank])[cd.rank()] for rank, tensor in enumerate(inputs)]
        assert torch.equal(rows, torch.cat(parts))
        assert received.tolist() == [line[cd.rank()] for line in table]


def case_alltoall_of_much() -> None:
    """Some megabytes, unevenly: everything goes to the last rank."""
    splits = [0] * (cd.size() - 1) + [400_000]
    rows, received = cd.alltoall(mine(torch.float32, (400_000, 3)), splits)
    if cd.rank() == cd.size() - 1:
        assert torch.equal(rows, torch.cat(everyones(torch.float32, (400_000, 3))))
    else:
        assert rows.shape == (0, 3)
    assert sum(received.tolist()) == len(rows)


@ranks(*EVERY)
def case_adasum_of_floats() -> None:
    for dtype, loose in [(torch.float64, 1e-7), (torch.float32, 1e-4), (torch.bfloat16, 0.1)]:
        found = cd.allreduce(mine(dtype, (40, 5)), op=cd.Adasum)
        vectors = [tensor.double() for tensor in everyones(dtype, (40, 5))]
        while len(vectors) > 1:
            pairs = [vectors[at : at + 2] for at in range(0, len(vectors), 2)]
            vectors = [pair[0] if len(pair) == 1 else adaptive(*pair) for pair in pairs]
        assert_close(found.double(), vectors[0], rtol=loose, atol=loose)


def adaptive(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    both = (left * right).sum()
    kept = [1 - both / (2 * one.square().sum()) for one in (left, right)]
    return kept[0] * left + kept[1] * right


@ranks(*EVERY)
def case_sparse_sums() -> None:
    tensor = torch.sparse_coo_tensor([[cd.rank(), 0]], torch.ones(2, 2), (cd.size(), 2), check_invariants=False)
    total = cd.sparse_allreduce_async(tensor, name="s", op=cd.Sum)().to_dense()
    wanted = torch.ones(cd.size(), 2)
    wanted[0] += cd.size()
    assert torch.equal(total, wanted)


@ranks(*EVERY)
def case_batch_normalisation_over_all_ranks() -> None:
    whole = torch.cat([tensor[: rank + 2] for rank, tensor in enumerate(everyones(torch.float64, (8, 3)))])
    own = mine(torch.float64, (8, 3))[: cd.rank() + 2].requires_grad_()
    norm, alone = cd.SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    norm(own).square().mul(own.detach()).sum().backward()
    everything = whole.clone().requires_grad_()
    alone(everything).square().mul(whole).sum().backward()
    assert_close(norm.state_dict(), alone.state_dict())
    start = sum(rank + 2 for rank in range(cd.rank()))
    assert_close(own.grad, everything.grad[start : start + len(own)])


def case_what_does_not_fit_is_told_to_all() -> None:
    with pytest.raises(cd.MismatchError, match="shape"):
        cd.reducescatter(torch.ones(2 + cd.rank(), 2), name="w")
    with pytest.raises(cd.MismatchError, match="operation"):
        cd.alltoall(torch.ones(4), name="x") if cd.rank() else cd.reducescatter(torch.ones(4), name="x")
    assert cd.allreduce(torch.tensor(1), op=cd.Sum) == cd.size()
