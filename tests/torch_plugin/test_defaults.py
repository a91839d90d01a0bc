"""Nothing depends on PyTorch's default device and type, which scripts may set: coordd's own tensors say what they are.

Tensors on the device "meta" have no values, so whatever lands there by mistake shows, without an accelerator.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank

CPU = {"device": "cpu", "dtype": torch.float32}


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, **CPU)


def trained(net: nn.Module, rank: int, loss: Callable[[nn.Module], torch.Tensor], **options: Any) -> list[torch.Tensor]:
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.0 if any_sparse(net) else 0.9)
    optimizer = cd.DistributedOptimizer(sgd, net.named_parameters(), **options)
    cd.broadcast_parameters(net.state_dict(), 0)
    for _ in range(4):
        optimizer.zero_grad()
        (loss(net) * (rank + 1)).backward()
        optimizer.step()
    cd.broadcast_optimizer_state(optimizer, 0)
    return [value.detach() for value in net.parameters()]


def filled(net: nn.Module) -> nn.Module:
    """Gives a model values of its own, for the generator of random ones is that of all ranks here."""
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.linspace(-0.5, 0.6, value.numel(), **CPU).view(value.shape))
    return net


def any_sparse(net: nn.Module) -> bool:
    return any(isinstance(module, nn.Embedding) and module.sparse for module in net.modules())


def dense(rank: int, **options: Any) -> list[torch.Tensor]:
    net = filled(nn.Sequential(nn.Linear(40, 30, **CPU), nn.ReLU(), nn.Linear(30, 20, **CPU)))
    return trained(net, rank, lambda net: net(ones(3, 40)).square().sum() / 100, **options)


def embedded(rank: int, **options: Any) -> list[torch.Tensor]:
    net = filled(nn.Embedding(10, 4, sparse=True, **CPU))
    rows = torch.tensor([rank, 3], device="cpu")
    return trained(net, rank, lambda net: net(rows).square().sum(), **options)


def half_embedded(rank: int) -> list[torch.Tensor]:
    """Rank 1 has no rows after the first step, and says so when a step is made, not in a hook of backward."""
    net = filled(nn.ModuleList([nn.Embedding(10, 4, sparse=True, **CPU), nn.Linear(4, 2, **CPU)]))
    rows, steps = torch.tensor([1, 3], device="cpu"), itertools.count()
    return trained(net, rank, lambda net: net[1](ones(2, 4) if rank and next(steps) else net[0](rows)).square().sum())


def joined(rank: int) -> list[Any]:
    net = filled(nn.Linear(4, 2, **CPU))
    optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    for _ in range(rank + 1):
        optimizer.zero_grad()
        net(ones(1, 4)).sum().backward()
        optimizer.step()
    return [optimizer.join(), net.weight.detach()]


def normalised(rank: int) -> list[torch.Tensor]:
    with torch.device("cpu"):
        norm = cd.SyncBatchNorm(3).float()
    values = (ones(4, 3) * torch.arange(4.0 * rank, 4.0 * rank + 4, **CPU)[:, None]).requires_grad_()
    norm(values).square().sum().backward()
    return [norm.running_mean, norm.running_var, values.grad]


def alltoall(rank: int) -> list[torch.Tensor]:
    given = (ones(4, 2) * rank).requires_grad_()
    rows = cd.alltoall(given, name="even")
    parts = [cd.alltoall(given, splits, name=f"uneven{number}") for number, splits in enumerate(SPLITS)]
    (rows.sum() + sum(part.sum() for part, _ in parts)).backward()
    return [rows.detach(), given.grad, *(part.detach() for part, _ in parts)]


SPLITS = [[1, 3], torch.tensor([1, 3], dtype=torch.int32)]


def sparse_sum(rank: int) -> list[torch.Tensor]:
    indices = torch.tensor([[rank, 3]], device="cpu")
    given = torch.sparse_coo_tensor(indices, ones(2, 2) * rank, (5, 2), device="cpu", check_invariants=False)
    return [cd.sparse_allreduce_async(given, name="s", op=cd.Sum).result().to_dense()]


WORK: dict[str, Callable[[int], list[Any]]] = {
    "training": dense,
    "training, accumulated": lambda rank: dense(rank, backward_passes_per_step=1, gradient_predivide_factor=2.0),
    "Adasum": lambda rank: dense(rank, op=cd.Adasum),
    "fp16": lambda rank: dense(rank, compression=cd.Compression.fp16),
    "int8": lambda rank: dense(rank, compression=cd.Compression.int8()),
    "top k": lambda rank: dense(rank, compression=cd.Compression.topk(ratio=0.1)),
    "PowerSGD": lambda rank: dense(rank, compression=cd.Compression.powersgd(rank=2)),
    "sparse gradients": embedded,
    "sparse gradients of one rank": half_embedded,
    "sparse gradients made dense": lambda rank: embedded(rank, sparse_as_dense=True),
    "sparse sums": sparse_sum,
    "join": joined,
    "SyncBatchNorm": normalised,
    "alltoall": alltoall,
    "allreduce in rounds": lambda rank: [cd.allreduce(ones(50) * rank, compression=cd.Compression.int8)],
    "allgather": lambda rank: [cd.allgather(ones(rank + 1, 2) * rank)],
    "reducescatter": lambda rank: [cd.reducescatter(ones(4, 2) * rank, op=cd.Sum)],
    "grouped": lambda rank: list(cd.grouped_allreduce([ones(3), ones(2) * rank])),
    "objects": lambda rank: [cd.broadcast_object({"x": ones(2)}, 0)["x"], *cd.allgather_object(rank)],
    "messages": lambda rank: [cd.recv(ones(2), 0, "m")] if rank else [cd.send(ones(2), 1, "m")],
    "common memory": lambda rank: [cd.allreduce(cd.empty_common(50, dtype=torch.float32).fill_(rank))],
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results(work: Callable[[int], list[Any]], surroundings: Callable[[], Any]) -> list[list[Any]]:
    def body(rank: int) -> list[Any]:
        with surroundings():
            return work(rank)

    return each_rank(2, body)


@pytest.mark.parametrize("what", WORK)
def test_a_default_device_changes_nothing(what):
    compare(results(WORK[what], lambda: torch.device("meta")), results(WORK[what], contextlib.nullcontext))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("what", WORK)
def test_a_default_type_changes_nothing(what, dtype):
    usual = results(WORK[what], contextlib.nullcontext)
    with default_dtype(dtype):  # of the process, which is that of all ranks here
        found = results(WORK[what], contextlib.nullcontext)
    compare(found, usual)


def compare(found: list[list[Any]], usual: list[list[Any]]) -> None:
    for mine, other in zip(found, usual, strict=True):
        for value, wanted in zip(mine, other, strict=True):
            if isinstance(wanted, torch.Tensor):
                assert (value.device.type, value.dtype) == ("cpu", wanted.dtype)
                assert torch.equal(value, wanted)
            else:
                assert value == wanted
