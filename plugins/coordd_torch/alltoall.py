"""`alltoall`: each rank sends some rows of a tensor to each rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from coordd import api
from coordd.daemon.reject_on_all_ranks import refusable
from coordd.ops.arguments import backward_names
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd_torch.tensors import borrow, check_dense, from_array

__all__ = ["alltoall", "alltoall_async"]

Tensor = torch.Tensor
Splits = torch.Tensor | list[int] | tuple[int, ...] | None


@refusable(Kind.ALLTOALL, api.operations)
def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Any]:
    """Starts to send each rank its rows and to concatenate the rows received from all ranks.

    Args:
        tensor: any number of rows; a row has the same shape and dtype on all ranks.
        splits: how many rows each rank receives, in rank order; by default all receive the same number.
        name: name of the operation, equal on all ranks.
        process_set: the ranks that take part.

    Returns:
        A handle whose result is the received rows in rank order; with `splits`, a pair of these rows and the number
        of rows that each rank sent.

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
    """Sends each rank its rows and returns the rows received from all ranks; differentiable.

    Arguments and result as in `alltoall_async`: with `splits` also returns how many rows each rank sent.
    """
    check_dense(tensor)
    rows, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return rows if splits is None else (rows, received)


class _Alltoall(torch.autograd.Function):
    """Autograd function of `alltoall`: the gradients of rows go back to the ranks that sent the rows."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        if splits is None and tensor.ndim:
            count = process_set.count(api.size())
            if len(tensor) % count:
                alltoall_async(tensor, None, name, process_set)  # raises the error
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
        # Rows that no rank received, or that a joined rank received, have zero gradient.
        found = back.new_zeros(ctx.rows, *back.shape[1:])
        starts = itertools.accumulate(ctx.splits, initial=0)
        for start, rows in zip(starts, back.split(returned.tolist()), strict=False):
            found[start : start + len(rows)] = rows
        return found, None, None, None
