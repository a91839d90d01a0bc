"""Collective operations on tensors, in eager mode or in a graph, with Horovod's names.

Arguments that only Horovod needs are accepted and ignored: devices, because the tensor's device is known, and name
scopes, because names are used as the caller gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordd import api
from coordd.daemon.autograd_rules import Allgather, Allreduce, Alltoall, Broadcast, Reducescatter
from coordd.daemon.reject_on_all_ranks import Name, refusable
from coordd.errors import ArgumentError
from coordd.host.world import World
from coordd.ops.arguments import check_op, places, reduce_op
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet, check_process_set, global_process_set
from coordd_tensorflow.compression import Compression, checked
from coordd_tensorflow.differentiable import differentiable
from coordd_tensorflow.graph import call
from coordd_tensorflow.slices import checked_slices, join_slices
from coordd_tensorflow.tensors import check_dense

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]

Tensors = Sequence[Any]


def _first(given: Mapping[str, Any]) -> Name:
    """Returns what a reduction submits first: the first tf.IndexedSlices, or else all dense tensors."""
    if "tensors" not in given:
        return Kind.ALLREDUCE, [given.get("name")]
    kind, names = _reductions(given)
    tensors = given["tensors"] if isinstance(given["tensors"], (list, tuple)) else []
    for tensor, each in zip(tensors, names, strict=False):
        if isinstance(tensor, tf.IndexedSlices):
            return kind, [each]
    return kind, names


def _group_of(kind: Kind, group: str = "tensors") -> Callable[[Mapping[str, Any]], Name]:
    """Returns a function that names a group's tensors, given its argument; other objects count as one tensor."""

    def find(given: Mapping[str, Any]) -> Name:
        tensors = given.get(group)
        return kind, places(given.get("name"), max(1, len(tensors)) if isinstance(tensors, (list, tuple)) else 1)

    return find


_reductions = _group_of(Kind.ALLREDUCE)


def _listed(tensors: Any) -> list[Any]:
    """Converts a group to a list of tensors.

    Raises:
        ArgumentError: it is not a list of tensors.
    """
    if isinstance(tensors, tf.Tensor) and tensors.shape.rank:
        return list(tf.unstack(tensors))
    if not isinstance(tensors, Iterable) or isinstance(tensors, (str, bytes, Mapping, tf.Tensor, tf.Variable)):
        text = f"a group is a list of tensors, not a {type(tensors).__name__}"
        raise ArgumentError(text)
    return list(tensors)


def _nothing(kind: Kind, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Submits an empty group, so that it takes its place in the order of groups of other ranks.

    Without a name it takes a number and waits for no rank. With a name it waits for the other ranks' groups of that
    name, which must be empty, too; if they are not, the daemon reports a deadlock.
    """
    source = api.source()

    def take() -> list[np.ndarray]:
        if name is None:
            empty = ArgumentError("its list of tensors is empty, and that of other ranks is not")
            check_process_set(process_set, source().daemon.world.size)
            source().refuse(kind, [None], process_set, empty)
        else:
            source().allgather(np.empty(0, np.uint8), name=f"{name}_0of0", process_set=process_set).result()
        return [np.array(0, np.int32)]

    call(take, [], [tf.int32])
    return []


@refusable(_first, api.operations)
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Returns the reduction of a tensor over all ranks; differentiable.

    Args:
        tensor: any shape, equal on all ranks; or `tf.IndexedSlices`, whose slices are gathered from all ranks.
        average: Horovod's old flag; use ``op``.
        device_dense: ignored.
        device_sparse: ignored.
        compression: one of `Compression`; not applied to the gradient in backward.
        op: `Average` (default), `AveragePresent`, `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: applied to each rank's tensor before the reduction.
        postscale_factor: applied to the result.
        name: equal on all ranks; without one, operations match in submission order.
        process_set: the ranks that take part.
        ignore_name_scope: ignored.

    Raises:
        ArgumentError: the dtype does not allow the operation.
        MismatchError, DuplicateNameError, PeerError, ShutdownError: see `coordd.errors`; in a graph TensorFlow converts
            them to `tf.errors.UnknownError`, with the same text.
    """
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced([tensor], [name], compression, reduce_op(op, average), process_set, **factors)[0]


@refusable(_first, api.operations)
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Returns the reductions of several tensors; arguments as in `allreduce`."""
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    tensors, op = _listed(tensors), reduce_op(op, average)
    if not tensors:
        checked(compression)
        return _nothing(Kind.ALLREDUCE, name, process_set)
    return _reduced(tensors, places(name, len(tensors)), compression, op, process_set, **factors)


def _reduced(
    tensors: Tensors,
    names: Sequence[str | None],
    compression: Any,
    op: ReduceOp,
    process_set: ProcessSet,
    *,
    prescale_factor: float,
    postscale_factor: float,
) -> list[Any]:
    compressor = checked(compression)
    sparse: dict[int, tf.IndexedSlices] = {}
    dense: dict[int, tuple[tf.Tensor, Any]] = {}
    for index, tensor in enumerate(tensors):  # check all tensors before submitting any
        if isinstance(tensor, tf.IndexedSlices):
            sparse[index] = checked_slices(tensor, op, (prescale_factor, postscale_factor))
        else:
            dense[index] = compressor.compress(check_dense(tensor))
    found: list[Any] = list(tensors)
    for index, slices in sparse.items():
        found[index] = join_slices(slices, names[index], op, process_set)
    if dense:
        operation = Allreduce(
            api.source(),
            [names[index] for index in dense],
            process_set,
            op=op,
            prescale=prescale_factor,
            postscale=postscale_factor,
        )
        results, _ = differentiable(operation, [small for small, _ in dense.values()])
        for (index, (_, context)), result in zip(dense.items(), results, strict=True):
            found[index] = compressor.decompress(result, context)
    return found


@refusable(Kind.ALLGATHER, api.operations)
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Returns the tensors of all ranks, concatenated along the first dimension, which may differ; differentiable.

    Raises:
        ArgumentError: the tensor is a scalar.
    """
    return _gathered([tensor], [name], process_set)[0]


@refusable(_group_of(Kind.ALLGATHER), api.operations)
def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Returns several tensors, each gathered as in `allgather`."""
    tensors = _listed(tensors)
    if not tensors:
        return _nothing(Kind.ALLGATHER, name, process_set)
    return _gathered(tensors, places(name, len(tensors)), process_set)


def _gathered(tensors: Tensors, names: Sequence[str | None], process_set: ProcessSet) -> list[tf.Tensor]:
    operation = Allgather(api.source(), names, process_set)
    found: list[tf.Tensor] = differentiable(operation, [check_dense(tensor) for tensor in tensors])[0]
    return found


@refusable(Kind.BROADCAST, api.operations)
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the root's tensor; differentiable.

    Args:
        tensor: of equal shape and type on all ranks.
        root_rank: the global rank whose values are copied.
        name: equal on all ranks.
        ignore_name_scope: ignored.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: the root is not in the process set.
    """
    operation = Broadcast(api.source(), [name], process_set, root=root_rank)
    return differentiable(operation, [check_dense(tensor)])[0][0]


@refusable(_group_of(Kind.BROADCAST, "variables"), api.operations)
def broadcast_(
    variables: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Copies the root's values into the variables of all ranks and returns the variables.

    Raises:
        ArgumentError: an element is not a variable, or the root is not in the process set.
    """
    variables = _listed(variables)
    if not variables:
        return _nothing(Kind.BROADCAST, name, process_set)
    if fixed := [variable for variable in variables if not hasattr(variable, "assign")]:
        text = f"a {type(fixed[0]).__name__} is no variable, into which values can be copied: use broadcast()"
        raise ArgumentError(text)
    operation = Broadcast(api.source(), places(name, len(variables)), process_set, root=root_rank)
    values, _ = differentiable(operation, [check_dense(variable) for variable in variables])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return variables


@refusable(Kind.ALLTOALL, api.operations)
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank its rows and returns the rows that all ranks sent to this one; differentiable.

    Args:
        tensor: any number of rows; row shape and dtype are equal on all ranks.
        splits: number of rows for each rank, in rank order; by default all ranks get the same number.
        name: equal on all ranks.
        ignore_name_scope: ignored.
        process_set: the ranks that take part.

    Returns:
        the received rows in rank order; with splits, also the number of rows from each rank.

    Raises:
        ArgumentError: the tensor is a scalar, or the splits do not fit.
    """
    given = [] if splits is None else [check_dense(splits)]
    if given and not given[0].dtype.is_integer:  # TensorFlow may not even run a graph with other dtypes
        text = f"alltoall expects splits to contain integer elements, not {given[0].dtype.name}"
        raise ArgumentError(text)
    (rows,), kept = differentiable(Alltoall(api.source(), [name], process_set), [check_dense(tensor)], given)
    return rows if splits is None else (rows, tf.cast(kept[1], given[0].dtype))


@refusable(Kind.REDUCESCATTER, api.operations)
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Returns this rank's rows of the reduced tensor; the first ranks get one more if needed; differentiable.

    Other arguments as in `allreduce`. The gradient is Horovod's: the gradients of all rows, times the number of ranks
    for a sum.
    """
    factors = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _scattered([tensor], [name], compression, op, process_set, **factors)[0]


@refusable(_group_of(Kind.REDUCESCATTER), api.operations)
def grouped_reducescatter(
    tensors: Tensors,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """Returns this rank's rows of several reduced tensors; arguments as in `reducescatter`."""
    factors = {"prescale": prescale_factor, "postscale": postscale_factor}
    tensors = _listed(tensors)
    if not tensors:
        checked(compression)
        check_op(op)
        return _nothing(Kind.REDUCESCATTER, name, process_set)
    return _scattered(tensors, places(name, len(tensors)), compression, op, process_set, **factors)


def _scattered(
    tensors: Tensors,
    names: Sequence[str | None],
    compression: Any,
    op: ReduceOp,
    process_set: ProcessSet,
    **factors: float,
) -> list[tf.Tensor]:
    compressor = checked(compression)
    small, contexts = zip(*(compressor.compress(check_dense(tensor)) for tensor in tensors), strict=True)
    operation = Reducescatter(api.source(), names, process_set, op=check_op(op), **factors)
    found, _ = differentiable(operation, small)
    return [compressor.decompress(rows, context) for rows, context in zip(found, contexts, strict=True)]


@refusable(Kind.BARRIER, api.operations)
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have reached the barrier."""
    source = api.source()

    def wait() -> list[np.ndarray]:
        source().barrier(process_set=process_set).result()
        return [np.array(0, np.int32)]

    call(wait, [], [tf.int32])


def join(process_set: ProcessSet = global_process_set) -> Any:
    """Waits until all ranks have joined; meanwhile contributes placeholders to the operations of the other ranks.

    Returns:
        the rank that joined last: an integer, or in a graph a tensor.
    """
    source = api.source()

    def wait() -> list[np.ndarray]:
        operations = source()
        with operations.daemon.unbroken("a join", series=("join",)):  # as in the PyTorch plugin
            return [operations.join(process_set=process_set).result().astype(np.int32)]

    (last,) = call(wait, [], [tf.int32])
    last.set_shape([])
    return int(last) if tf.executing_eagerly() else last


def _asked(question: Callable[[World], int]) -> tf.Tensor:
    """Evaluates the function each time the graph runs, because a graph may outlive a daemon."""
    source = api.source()
    (found,) = call(lambda: [np.array(question(source().daemon.world), np.int32)], [], [tf.int32])
    found.set_shape([])
    return found


def size_op(process_set_id: Any = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks in the world or in a process set, evaluated at run time.

    Raises:
        ArgumentError: the process set does not exist.
    """
    chosen = _set_of(process_set_id)
    return _asked(lambda world: len(_members(chosen, world)))


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this process's rank, evaluated at run time."""
    return _asked(lambda world: world.rank)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this process's local rank on its host, evaluated at run time."""
    return _asked(lambda world: world.local_rank)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host, evaluated at run time."""
    return _asked(lambda world: world.local_size)


def process_set_included_op(process_set_id: Any = 0, name: str | None = None) -> tf.Tensor:
    """Returns 1 if this rank is in the process set, else 0, evaluated at run time.

    Raises:
        ArgumentError: the process set does not exist.
    """
    chosen = _set_of(process_set_id)
    return _asked(lambda world: world.rank in _members(chosen, world))


def _members(process_set: ProcessSet, world: World) -> Sequence[int]:
    check_process_set(process_set, world.size)
    return process_set.ranks or range(world.size)


def _set_of(process_set_id: Any) -> ProcessSet:
    """Returns the process set with a `ProcessSet.process_set_id`, which lists its ranks; Horovod's 0 means all ranks.

    Raises:
        ArgumentError: it is not a process set id.
    """
    if isinstance(process_set_id, ProcessSet):
        return process_set_id
    if isinstance(process_set_id, (int, np.integer)) and not process_set_id:
        return global_process_set
    try:
        named = process_set_id.split(",")
        return global_process_set if named == ["all"] else ProcessSet([int(rank) for rank in named])
    except (AttributeError, ValueError) as error:
        text = f"{process_set_id!r} is no process_set_id: give that of a ProcessSet, or 0 for all ranks"
        raise ArgumentError(text) from error
