"""Operations on tensors; most are thin wrappers of the asynchronous in-place forms.

The synchronous out-of-place forms are in `coordd_torch.differentiable`, because autograd differentiates them.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch

from coordd import api
from coordd.daemon.reject_on_all_ranks import refusable
from coordd.errors import HandleError
from coordd.ops.arguments import places, reduce_op
from coordd.ops.handles import Handle, check_may_wait, wait_all
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd_torch.tensors import borrow, check_dense, from_array

__all__ = [
    "Adasum",
    "Average",
    "AveragePresent",
    "GroupHandle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather_async",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "each",
    "gathered_async",
    "grouped_allgather_async",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "join",
    "poll",
    "recv",
    "recv_async",
    "send",
    "send_async",
    "synchronize",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Adasum = ReduceOp.ADASUM
AveragePresent = ReduceOp.AVERAGE_PRESENT
Product = ReduceOp.PRODUCT

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]
P = ParamSpec("P")


class GroupHandle:
    """One handle of several operations; the result is a tuple in the order of the tensors."""

    def __init__(self, handles: Sequence[Handle[Any]]) -> None:
        self._handles = handles

    def poll(self) -> bool:
        """Returns whether all operations are done."""
        return all(handle.poll() for handle in self._handles)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for all operations, at most ``timeout`` seconds; returns whether all are done."""
        end = None if timeout is None else time.monotonic() + timeout
        return all(handle.wait(None if end is None else max(0.0, end - time.monotonic())) for handle in self._handles)

    def result(self) -> tuple[Tensor, ...]:
        """Waits for all operations and returns their results; raises the error of the first that failed."""
        wait_all(self._handles)
        return tuple(handle.result() for handle in self._handles)


AnyHandle = Handle[Tensor] | GroupHandle


def poll(handle: AnyHandle) -> bool:
    """Returns whether `synchronize` would return at once.

    Raises:
        HandleError: the argument is no handle.
    """
    return _checked(handle).poll()


def synchronize(handle: AnyHandle) -> Any:
    """Waits for an operation and returns its tensor, or a tuple for a grouped operation.

    Raises:
        HandleError: the argument is no handle.
        MismatchError, DuplicateNameError, PeerError, ShutdownError: the operation failed.
    """
    return _checked(handle).result()


def _checked(handle: object) -> AnyHandle:
    if not isinstance(handle, (Handle, GroupHandle)):
        raise HandleError(handle)
    return handle


def _blocking(start: Callable[P, Handle[Tensor]], name: str, about: str) -> Callable[P, Tensor]:
    """Returns the blocking form of an operation.

    ``start`` is `refusable`, so this form is not: a second layer would only add calls, whose cost dominates small
    operations.
    """

    @functools.wraps(start)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return start(*args, **kwargs).result()

    blocking.__name__ = blocking.__qualname__ = name
    blocking.__doc__ = about
    vars(blocking)["__signature__"] = inspect.signature(start).replace(return_annotation="Tensor")
    return blocking


@refusable(Kind.ALLREDUCE, api.operations)
def allreduce_async_(  # noqa: PLR0917 - Horovod's signature
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """Starts to reduce a tensor over all ranks, in place.

    Args:
        tensor: any shape, equal on all ranks; it must not be used until the handle is done.
        average: Horovod's old flag; use ``op``.
        name: equal on all ranks; operations without a name match in the order in which they are started.
        op: `Average` (default), `AveragePresent` (of the ranks that have not joined), `Sum`, `Min`, `Max`, `Product`
            or `Adasum`.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: the dtype does not support the operation.
    """
    array, back = _lend(tensor)
    return api.operations().allreduce(
        array,
        name=name,
        op=reduce_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        land=back,
    )


@refusable(Kind.ALLREDUCE, api.operations, allreduce_async_)
def allreduce_async(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle[Tensor]:
    """Starts to reduce a copy of a tensor; arguments as in `allreduce_async_`."""
    return allreduce_async_(_copy(tensor), *args, **kwargs)


allreduce_ = _blocking(
    allreduce_async_, "allreduce_", "Reduces a tensor in place and returns it; arguments as in `allreduce_async_`."
)


@refusable(Kind.ALLGATHER, api.operations)
def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Starts to concatenate all ranks' tensors along the first dimension, whose size may differ between ranks.

    Raises:
        ArgumentError: the tensor has no dimension.
    """
    array, _ = borrow(tensor)
    device = tensor.device

    def land(gathered: Any) -> Tensor:
        return from_array(gathered).to(device)

    return api.operations().allgather(array, name=name, process_set=process_set, land=land)


@refusable(Kind.ALLGATHER, api.operations)
def gathered_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[tuple[Tensor, list[int]]]:
    """Starts an `allgather_async` that also returns how many rows each rank had; 0 for joined ranks."""
    array, _ = borrow(tensor)
    device = tensor.device

    def land(gathered: Any, sizes: Any) -> tuple[Tensor, list[int]]:
        return from_array(gathered).to(device), sizes.tolist()

    return api.operations().allgather(array, name=name, process_set=process_set, land=land, sized=True)


@refusable(Kind.BROADCAST, api.operations)
def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Starts to copy the root's tensor into the tensors of all ranks.

    Args:
        tensor: of equal shape and dtype on all ranks.
        root_rank: the global rank whose values are copied.
        name: equal on all ranks.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: the root does not take part.
    """
    array, back = _lend(tensor)
    return api.operations().broadcast(array, root_rank, name=name, process_set=process_set, land=back)


@refusable(Kind.BROADCAST, api.operations, broadcast_async_)
def broadcast_async(tensor: Tensor, root_rank: int, *args: Any, **kwargs: Any) -> Handle[Tensor]:
    """Starts to copy the root's tensor into a new tensor; arguments as in `broadcast_async_`."""
    return broadcast_async_(_copy(tensor), root_rank, *args, **kwargs)


broadcast_ = _blocking(
    broadcast_async_,
    "broadcast_",
    "Copies the root's tensor into that of all ranks and returns it; arguments as in `broadcast_async_`.",
)


def each(
    start: Callable[..., Handle[Any]], tensors: Tensors, names: Sequence[str | None], **details: Any
) -> GroupHandle:
    """Starts one operation per tensor: all of them or, if one is rejected, none."""
    if len(tensors) == 1:
        return GroupHandle([start(tensors[0], name=names[0], **details)])
    with api.operations().together(names):
        return GroupHandle([start(tensor, name=name, **details) for tensor, name in zip(tensors, names, strict=True)])


@refusable(Kind.ALLREDUCE, api.operations)
def grouped_allreduce_async_(  # noqa: PLR0917 - Horovod's signature
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle:
    """Starts to reduce several tensors in place; other arguments as in `allreduce_async_`."""
    details = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "process_set": process_set}
    return each(allreduce_async_, tensors, places(name, len(tensors)), op=reduce_op(op, average), **details)


@refusable(Kind.ALLREDUCE, api.operations, grouped_allreduce_async_)
def grouped_allreduce_async(tensors: Tensors, *args: Any, **kwargs: Any) -> GroupHandle:
    """Starts to reduce copies of several tensors; arguments as in `grouped_allreduce_async_`."""
    return grouped_allreduce_async_([_copy(tensor) for tensor in tensors], *args, **kwargs)


@refusable(Kind.ALLREDUCE, api.operations, grouped_allreduce_async_)
def grouped_allreduce_(tensors: Tensors, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Reduces several tensors in place and returns them; arguments as in `grouped_allreduce_async_`."""
    return grouped_allreduce_async_(tensors, *args, **kwargs).result()


@refusable(Kind.ALLGATHER, api.operations)
def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> GroupHandle:
    """Starts to gather several tensors, each as `allgather_async` does."""
    return each(allgather_async, tensors, places(name, len(tensors)), process_set=process_set)


@refusable(Kind.BARRIER, api.operations)
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have reached the barrier."""
    api.barrier(process_set=process_set)


@refusable(Kind.JOIN, api.operations)
def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:  # noqa: ARG001 - Horovod's signature
    """Waits until all ranks have joined; contributes placeholders to the operations of other ranks until then.

    Args:
        device: Horovod's argument; not needed.
        process_set: the ranks to wait for.

    Returns:
        The rank that joined last. If each rank waits for its operations before it joins, this one has made all of them.
    """
    operations = api.operations()
    # An interrupted join would stay in force: the other ranks would continue without this one while its script trains.
    with operations.daemon.unbroken("a join", series=("join",)):
        return int(operations.join(process_set=process_set).result())


def send_async(tensor: Tensor, destination: int, name: str) -> Handle[Tensor]:
    """Starts to send a tensor to one rank, which must receive it under the same name.

    Raises:
        ArgumentError: the rank does not exist, or the name is invalid.
    """
    operations = api.operations()
    with operations.refusing(destination, name, outgoing=True):
        array, _ = borrow(tensor)
        return operations.send(array, destination, name=name)


def send(tensor: Tensor, destination: int, name: str) -> None:
    """Sends a tensor to one rank; returns when the tensor may be changed and, if large, has been received.

    Raises:
        ShutdownError: the destination has left the job.
    """
    send_async(tensor, destination, name).result()


def recv_async(tensor: Tensor, source: int, name: str) -> Handle[Tensor]:
    """Starts to receive into a tensor the values that a rank sends under the same name.

    Raises:
        ArgumentError: the rank does not exist, or the name is invalid.
    """
    operations = api.operations()
    with operations.refusing(source, name, outgoing=False):
        array, back = _lend(tensor)
        return operations.recv(array, source, name=name, land=back)


def recv(tensor: Tensor, source: int, name: str) -> Tensor:
    """Receives into a tensor and returns it.

    If an exception interrupts it, as from a signal handler, the receive is withdrawn: the next one gets the message.

    Raises:
        MismatchError: the sent tensor has another shape or dtype, or the source waits too, so that it will never send.
        RefusedError: the source has rejected the send.
        ShutdownError: the source has left the job.
        DeadlockError: called in a done callback, or on the daemon's thread, which would wait for its own work.
    """
    check_may_wait(f"receiving {name!r}")
    handle = recv_async(tensor, source, name)
    try:
        return handle.result()
    except BaseException as error:
        api.operations().daemon.take_back(handle, error)
        raise


def _lend(tensor: Tensor) -> tuple[Any, Callable[[Any], Tensor]]:
    """Returns `borrow(tensor)` for an in-place operation; increments the tensor's version counter for autograd."""
    lent = borrow(tensor)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return lent


def _copy(tensor: Tensor) -> Tensor:
    check_dense(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)
