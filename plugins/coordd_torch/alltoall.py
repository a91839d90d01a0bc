"""`alltoall`: every rank gives each other rank some rows of a tensor."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from coordd import api
from coordd.arguments import backward_names
from coordd.handles import Handle
from coordd.messages import Kind
from coordd.process_sets import ProcessSet, global_process_set
from coordd.refusing import refusable
from coordd_torch.tensors import borrow, check_dense, from_array

__all__ = ["alltoall", "alltoall_async"]

Tensor = torch.Tensor
Splits = torch.Tensor | list[int] | tuple[int, ...] | None


@refusable(Kind.ALLTOALL, api.operations)
def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Any]:
    """Starts to give each rank its rows, and to join the rows that the ranks have for this one.

    Args:
        tensor: of any number of rows, which are equal in shape and type on all ranks.
        splits: how many rows each rank gets, in the order of ranks; by default all get the same number.
        name: equal on all ranks.
        process_set: the ranks that take part.

    Returns:
        a handle of the rows in the order of ranks; with splits, of them and how many rows each rank has sent.

    Raises:
        ArgumentError: the tensor has no dimension, or the splits do not fit.
    """
    array, _ = borrow(tensor)
    device = tensor.device
    like = splits if isinstance(splits, torch.Tensor) else None

    def land(rows: np.ndarray, received: np.ndarray) -> Any:
        found = from_array(rows).to(device)
        if splits is None:
            return found
        return found, torch.from_numpy(received).to(torch.int32 if like is None else like.dtype)

    given = splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits
    return api.operations().alltoall(array, given, name=name, process_set=process_set, land=land)


@refusable(Kind.ALLTOALL, api.operations)
def alltoall(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Gives each rank its rows and returns those that the ranks had for this one; differentiable.

    With splits it returns also how many rows each rank has sent; arguments as in `alltoall_async`.
    """
    check_dense(tensor)
    rows, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return rows if splits is None else (rows, received)


class _Alltoall(torch.autograd.Function):
    """The gradients of rows go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        if splits is None and tensor.ndim:
            count = process_set.count(api.size())
            if len(tensor) % count:
                alltoall_async(tensor, None, name, process_set)  # which says what is wrong
            splits = torch.full((count,), len(tensor) // count, dtype=torch.int32, device="cpu")
        rows, received = alltoall_async(tensor, splits, name, process_set).result()
        ctx.received, ctx.name, ctx.process_set = received, name, process_set
        ctx.splits, ctx.rows = torch.as_tensor(splits, device="cpu").tolist(), len(tensor)
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        (name,) = backward_names([ctx.name])
        back, returned = alltoall(gradient, ctx.received, name, ctx.process_set)
        if len(back) == ctx.rows:
            return back, None, None, None
        # Rows that nobody got, or whoever had joined, have no gradient.
        found = back.new_zeros(ctx.rows, *back.shape[1:])
        starts = itertools.accumulate(ctx.splits, initial=0)
        for start, rows in zip(starts, back.split(returned.tolist()), strict=False):
            found[start : start + len(rows)] = rows
        return found, None, None, None
