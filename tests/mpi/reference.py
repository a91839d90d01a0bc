"""What a single process would compute: every rank can make every rank's tensor, and so the expected result."""

from __future__ import annotations

import torch

import coordd.torch as cd
from coordd.ops.messages import ReduceOp

__all__ = ["everyones", "mine", "reduced"]

_REDUCE = {
    cd.Sum: lambda stacked: stacked.sum(0),
    cd.Average: lambda stacked: stacked.mean(0),
    cd.Min: lambda stacked: stacked.amin(0),
    cd.Max: lambda stacked: stacked.amax(0),
    cd.Product: lambda stacked: stacked.prod(0),
}


def everyones(
    dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (5, 3), *, seed: int = 0
) -> list[torch.Tensor]:
    """The tensors of all ranks, in the order of ranks."""
    return [_tensor(dtype, shape, seed * 1000 + rank) for rank in range(cd.size())]


def mine(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (5, 3), *, seed: int = 0) -> torch.Tensor:
    """This rank's among them."""
    return everyones(dtype, shape, seed=seed)[cd.rank()]


def reduced(tensors: list[torch.Tensor], op: ReduceOp = cd.Sum) -> torch.Tensor:
    """Their reduction, computed in the widest type of their kind and rounded once."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    result: torch.Tensor = _REDUCE[op](torch.stack([tensor.to(wide) for tensor in tensors]))
    return result.to(dtype)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32), generator=generator).to(dtype)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)
