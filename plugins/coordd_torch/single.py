"""A single tensor in the rounds of a compressor: an allreduce of its own, outside any optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordd import api
from coordd.errors import ArgumentError
from coordd.handles import Handle
from coordd.messages import Kind, ReduceOp
from coordd.process_sets import ProcessSet
from coordd_torch.channel import check_combines, share
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.journey import Journey, calmly
from coordd_torch.operations import allreduce_async

__all__ = ["check_single", "in_rounds"]


def check_single(compressor: Compressor, op: ReduceOp) -> None:
    """Refuses what makes sense in training only.

    Raises:
        ArgumentError: the compressor has to see the same tensor again and again, or cannot combine so.
    """
    if compressor.feedback:
        text = (
            f"{type(compressor).__name__} sends in later steps what it leaves out in this one, and an allreduce has no "
            "later step: use it in DistributedOptimizer, and Compression.int8, fp16 or bf16 here"
        )
        raise ArgumentError(text)
    check_combines(compressor, op)


def in_rounds(
    compressor: Compressor,
    tensors: Sequence[Tensor],
    names: Sequence[str | None],
    *,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> tuple[Tensor, ...]:
    """Returns the reductions of tensors, one after the other, on the user's thread; other types travel as they are."""
    members = process_set.count(api.size())
    api.operations().account()  # from now on parts of it may be under way
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    found = []
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.is_floating_point() or not tensor.numel():
            found.append(allreduce_async(tensor, None, name, op, process_set=process_set, **scales).result())
            continue
        with calmly(tensor):
            flat = tensor.detach().flatten().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            place = {name or "": (0, tuple(tensor.shape))}
            journey = Journey(compressor, Cargo(flat, place, dtype=tensor.dtype, size=members, memory={}))
            mean = _carried(journey, name, process_set)
            factor = share(op, present=journey.present, members=members) * prescale_factor * postscale_factor
            found.append(mean.mul(factor).to(tensor.dtype).view_as(tensor))
    return tuple(found)


def _carried(journey: Journey, name: str | None, process_set: ProcessSet) -> Tensor:
    """Carries out all rounds, and returns the mean over the members."""
    array: np.ndarray | None = journey.begin(torch.empty(0, device="cpu"))
    while array is not None:
        array = journey.land(_exchanged(array, journey, name, process_set))
    return torch.full_like(journey.cargo.flat, math.nan) if journey.mean is None else journey.mean


def _exchanged(array: np.ndarray, journey: Journey, name: str | None, process_set: ProcessSet) -> np.ndarray:
    operations = api.operations()
    where: dict[str, Any] = {"name": name and f"{name}.round{journey.number}", "process_set": process_set}
    handle: Handle[np.ndarray]
    if journey.kind is Kind.ALLREDUCE:
        handle = operations.allreduce(array, op=ReduceOp.AVERAGE, **where)
    elif journey.kind is Kind.ALLGATHER:
        handle = operations.allgather(array, **where)
    else:
        handle = operations.alltoall(array, journey.splits, land=lambda found, _: found, **where)
    return handle.result()
