"""Allreduce of single tensors in the rounds of a compressor, outside any optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordd import api
from coordd.daemon.reject_on_all_ranks import telling
from coordd.errors import ArgumentError
from coordd.negotiation.group_names import first_alone
from coordd.ops.checks import finite
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd_torch.communication import check_combines, share
from coordd_torch.compression_session import Journey, calmly
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.operations import allreduce_async

__all__ = ["check_single", "in_rounds"]


def check_single(compressor: Compressor, op: ReduceOp) -> None:
    """Rejects a compressor that works in training only.

    Raises:
        ArgumentError: the compressor needs the same tensor in later steps, or does not support `op`.
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
    """Reduces tensors one after the other, on the user's thread; non-floating-point ones are sent uncompressed."""
    prescale_factor = finite(prescale_factor, "prescale_factor")
    postscale_factor = finite(postscale_factor, "postscale_factor")
    members = process_set.count(api.size())
    turns = _Turns(names, process_set)
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    found = []
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.is_floating_point() or not tensor.numel():
            with turns.telling():
                handle = allreduce_async(tensor, None, turns.name(), op, process_set=process_set, **scales)
                turns.advance()
            found.append(handle.result())
            continue
        with calmly(tensor):
            with turns.telling():
                flat = tensor.detach().flatten().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
                place = {name or "": (0, tuple(tensor.shape))}
                journey = Journey(compressor, Cargo(flat, place, dtype=tensor.dtype, size=members, memory={}))
            mean = _carried(journey, turns)
            factor = share(op, present=journey.present, members=members) * prescale_factor * postscale_factor
            found.append(mean.mul(factor).to(tensor.dtype).view_as(tensor))
    return tuple(found)


class _Turns:
    """Names of the rounds of one operation.

    The first round has the name, or the number, of the operation itself: a rank that rejects the operation cannot know
    its rounds, and thus rejects the name that the other ranks submit first.
    """

    def __init__(self, names: Sequence[str | None], process_set: ProcessSet) -> None:
        self._base = names[0] if len(names) == 1 else first_alone(names[0])
        self._number = 0
        self.process_set = process_set

    def name(self) -> str:
        """Returns the name of the next round."""
        if self._base is None:
            self._base = api.operations().number(Kind.ALLREDUCE, self.process_set)
        return self._next() or ""

    def advance(self) -> None:
        """Notes that the next round was submitted."""
        self._number += 1

    def telling(self) -> AbstractContextManager[None]:
        """Context that reports an error before the next round is submitted to the ranks that wait in that round."""
        return telling(api.operations(), Kind.ALLREDUCE, lambda: [self._next()], self.process_set)

    def _next(self) -> str | None:
        return f"{self._base}.round{self._number}" if self._base and self._number else self._base


def _carried(journey: Journey, turns: _Turns) -> Tensor:
    """Runs all rounds and returns the mean over the members; NaN if a rank had non-finite values."""
    array: np.ndarray | None
    with turns.telling():
        array = journey.begin(torch.empty(0, device="cpu"))
    while array is not None:
        with turns.telling():
            handle = _announced(array, journey, turns)
            turns.advance()
        arrived = handle.result()
        with turns.telling():
            array = journey.land(arrived)
    return torch.full_like(journey.cargo.flat, math.nan) if journey.mean is None else journey.mean


def _announced(array: np.ndarray, journey: Journey, turns: _Turns) -> Handle[np.ndarray]:
    operations = api.operations()
    where: dict[str, Any] = {"name": turns.name(), "process_set": turns.process_set}
    if journey.kind is Kind.ALLREDUCE:
        return operations.allreduce(array, op=ReduceOp.AVERAGE, **where)
    if journey.kind is Kind.ALLGATHER:
        return operations.allgather(array, **where)
    return operations.alltoall(array, journey.splits, land=lambda found, _: found, **where)
