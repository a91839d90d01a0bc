"""Synchronous out-of-place operations that autograd differentiates.

Gradients are defined as in Horovod: as those of the mean of the loss over the ranks. The gradient of a named operation
has a name too, so that ranks whose backward passes differ get an error instead of the sum of unrelated tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from coordd import api
from coordd.daemon.reject_on_all_ranks import refusable
from coordd.ops.arguments import backward_names, no_gradient, places, reduce_op
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd_torch.compression import Compression, Compressor, made
from coordd_torch.operations import (
    Average,
    Max,
    Min,
    Product,
    Tensor,
    Tensors,
    allreduce_async,
    broadcast_async,
    each,
    gathered_async,
)
from coordd_torch.single import check_single, in_rounds

__all__ = ["allgather", "allreduce", "broadcast", "grouped_allgather", "grouped_allreduce"]


@refusable(Kind.ALLREDUCE, api.operations)
def allreduce(  # noqa: PLR0917 - Horovod's signature
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor | type = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the reduction of a tensor over all ranks; differentiable.

    ``compression`` is a stateless member of `Compression`, a class or an object; gradients are sent uncompressed. The
    other arguments are those of `allreduce_async_`.

    Raises:
        ArgumentError: the compression defers values to later steps, or does not support ``op``.
    """
    details = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "process_set": process_set}
    return _reduced([tensor], [name], compression, op=reduce_op(op, average), **details)[0]


def _reduced(
    tensors: Tensors, names: Sequence[str | None], compression: Compressor | type, **details: Any
) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    compressor = made(compression)
    if not compressor.simple:
        check_single(compressor, details["op"])
        carried: tuple[Tensor, ...] = _Allreduce.apply(partial(in_rounds, compressor), names, details, *tensors)  # type: ignore[no-untyped-call]
        return carried
    small = [compressor.compress(tensor) for tensor in tensors]
    found = _Allreduce.apply(_as_they_are, names, details, *(tensor for tensor, _ in small))  # type: ignore[no-untyped-call]
    return tuple(compressor.decompress(tensor, context) for tensor, (_, context) in zip(found, small, strict=True))


def _as_they_are(tensors: Tensors, names: Sequence[str | None], **details: Any) -> tuple[Tensor, ...]:
    return each(allreduce_async, tensors, names, **details).result()


class _Allreduce(torch.autograd.Function):
    """Autograd function of allreduce: the gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        reduce: Callable[..., tuple[Tensor, ...]],
        names: Sequence[str | None],
        details: dict[str, Any],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.names, ctx.details = names, details
        return reduce(tensors, names, **details)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        op = ctx.details["op"]
        if op in {Max, Min, Product}:
            raise no_gradient(op)
        return None, None, None, *_reduced(gradients, backward_names(ctx.names), Compression.none, **ctx.details)


@refusable(Kind.ALLREDUCE, api.operations)
def grouped_allreduce(  # noqa: PLR0917 - Horovod's signature
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor | type = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Returns the reductions of several tensors; differentiable; other arguments as in `allreduce`."""
    details = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "process_set": process_set}
    return _reduced(tensors, places(name, len(tensors)), compression, op=reduce_op(op, average), **details)


@refusable(Kind.ALLGATHER, api.operations)
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns the tensors of all ranks, concatenated along the first dimension in rank order; differentiable."""
    return _gathered([tensor], [name], process_set)[0]


def _gathered(tensors: Tensors, names: Sequence[str | None], process_set: ProcessSet) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    found: tuple[Tensor, ...] = _Allgather.apply(names, process_set, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Allgather(torch.autograd.Function):
    """Autograd function of allgather: the gradient is this rank's rows of the averaged gradients."""

    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.names, ctx.process_set = names, process_set
        found = each(gathered_async, tensors, names, process_set=process_set).result()
        me = (process_set.ranks or range(api.size())).index(api.rank())
        ctx.starts, ctx.rows = [sum(sizes[:me]) for _, sizes in found], [len(tensor) for tensor in tensors]
        return tuple(rows for rows, _ in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        names, process_set = backward_names(ctx.names), ctx.process_set
        averaged = _reduced(gradients, names, Compression.none, op=Average, process_set=process_set)
        mine = zip(averaged, ctx.starts, ctx.rows, strict=True)
        return None, None, *(rows[start : start + count] for rows, start, count in mine)


@refusable(Kind.ALLGATHER, api.operations)
def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Returns several tensors, each gathered as `allgather` does; differentiable."""
    return _gathered(tensors, places(name, len(tensors)), process_set)


@refusable(Kind.BROADCAST, api.operations)
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the root's tensor; differentiable."""
    copied: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return copied


class _Broadcast(torch.autograd.Function):
    """Autograd function of broadcast: the gradient is the average on the root, and zero on other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.names, ctx.root_rank = [name], root_rank
        ctx.process_set = process_set
        return broadcast_async(tensor, root_rank, name, process_set).result()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (averaged,) = _reduced(
            gradients, backward_names(ctx.names), Compression.none, op=Average, process_set=ctx.process_set
        )
        return averaged if api.rank() == ctx.root_rank else torch.zeros_like(averaged), None, None, None
