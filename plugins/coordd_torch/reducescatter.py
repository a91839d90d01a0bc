"""`reducescatter`: a reduction whose result is split by rows among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from coordd import api
from coordd.daemon.reject_on_all_ranks import refusable
from coordd.errors import ArgumentError
from coordd.ops.arguments import backward_names, check_op, no_gradient, places
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd_torch.compression import Compression, Compressor, made
from coordd_torch.operations import (
    Average,
    GroupHandle,
    Sum,
    Tensor,
    Tensors,
    each,
    gathered_async,
)
from coordd_torch.tensors import borrow, check_dense, from_array

__all__ = ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]


@refusable(Kind.REDUCESCATTER, api.operations)
def reducescatter_async(  # noqa: PLR0917 - Horovod's signature
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Starts to reduce a tensor and to send each rank its part of the rows.

    Args:
        tensor: of equal shape and dtype on all ranks; not changed. If its rows cannot be divided evenly, the first
            ranks get one more.
        name: equal on all ranks.
        op: any reduction except Adasum.
        process_set: the ranks that take part.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.

    Raises:
        ArgumentError: the tensor has no dimension, or its dtype does not support the operation.
    """
    array, _ = borrow(tensor)
    device = tensor.device
    return api.operations().reducescatter(
        array,
        name=name,
        op=check_op(op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        land=lambda rows: from_array(rows).to(device),
    )


@refusable(Kind.REDUCESCATTER, api.operations)
def grouped_reducescatter_async(  # noqa: PLR0917 - Horovod's signature
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> GroupHandle:
    """Starts to reduce and scatter several tensors; other arguments as in `reducescatter_async`."""
    details = _details(op, process_set, prescale_factor, postscale_factor)
    return each(reducescatter_async, tensors, places(name, len(tensors)), **details)


@refusable(Kind.REDUCESCATTER, api.operations)
def reducescatter(  # noqa: PLR0917 - Horovod's signature
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor | type = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Returns this rank's rows of a reduction; differentiable; arguments as in `reducescatter_async`.

    The gradient is Horovod's: the gradients of all rows, times the number of ranks for a sum.
    """
    return _scattered([tensor], [name], compression, _details(op, process_set, prescale_factor, postscale_factor))[0]


@refusable(Kind.REDUCESCATTER, api.operations)
def grouped_reducescatter(  # noqa: PLR0917 - Horovod's signature
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor | type = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tuple[Tensor, ...]:
    """Returns this rank's rows of several reductions; differentiable; other arguments as in `reducescatter`."""
    details = _details(op, process_set, prescale_factor, postscale_factor)
    return _scattered(tensors, places(name, len(tensors)), compression, details)


def _details(op: ReduceOp, process_set: ProcessSet, prescale: float, postscale: float) -> dict[str, Any]:
    factors = {"prescale_factor": prescale, "postscale_factor": postscale}
    return {"op": check_op(op), "process_set": process_set, **factors}


def _scattered(
    tensors: Tensors, names: Sequence[str | None], compression: Compressor | type, details: dict[str, Any]
) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    compressor = made(compression)
    if not compressor.simple:
        text = f"{type(compressor).__name__} reduces whole tensors: use Compression.fp16 or bf16, or allreduce"
        raise ArgumentError(text)
    for tensor in tensors:
        check_dense(tensor)
    small = [compressor.compress(tensor) for tensor in tensors]
    found = _Reducescatter.apply(names, details, *(tensor for tensor, _ in small))  # type: ignore[no-untyped-call]
    return tuple(compressor.decompress(tensor, context) for tensor, (_, context) in zip(found, small, strict=True))


class _Reducescatter(torch.autograd.Function):
    """Autograd function of reduce-scatter: the gradient is the concatenation of the gradients of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], details: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.names, ctx.details, ctx.shapes = names, details, [tensor.shape for tensor in tensors]
        return each(reducescatter_async, tensors, names, **details).result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        details = ctx.details
        op, process_set = details["op"], details["process_set"]
        if op not in {Average, Sum}:
            raise no_gradient(op)
        factor = details["prescale_factor"] * details["postscale_factor"]
        factor *= process_set.count(api.size()) if op is Sum else 1
        gathered: Any = each(gathered_async, gradients, backward_names(ctx.names), process_set=process_set).result()
        found = [_whole(rows, sizes, shape) for (rows, sizes), shape in zip(gathered, ctx.shapes, strict=True)]
        return None, None, *(gradient * factor for gradient in found)


def _whole(rows: Tensor, sizes: list[int], shape: torch.Size) -> Tensor:
    """Returns the gradients of all rows; zero for the rows of joined ranks, which have no gradients."""
    if len(rows) == shape[0]:
        return rows
    found = rows.new_zeros(shape)
    for place, mine in zip(torch.tensor_split(found, len(sizes)), rows.split(sizes), strict=True):
        place[: len(mine)] = mine
    return found
