"""Operations on tensors, at once or in a graph, under Horovod's names.

What Horovod needs to know and coordd does not is taken and has no effect: devices, for where a tensor lies is known
without them, and name scopes, for a name is what the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordd import api
from coordd.arguments import check_op, places, reduce_op
from coordd.differentiable import Allgather, Allreduce, Alltoall, Broadcast, Reducescatter
from coordd.errors import ArgumentError
from coordd.messages import Kind, ReduceOp
from coordd.operations import Operations
from coordd.process_sets import ProcessSet, global_process_set
from coordd.refusing import Name, refusable
from coordd.world import World
from coordd_tensorflow.compression import Compression, checked
from coordd_tensorflow.differentiable import differentiable
from coordd_tensorflow.graph import call
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


def _current(*_: Any) -> Operations:
    """Returns the operations of the default daemon, whatever the arguments."""
    return api.operations()


def _first(given: Mapping[str, Any]) -> Name:
    """What a reduction announces first: of tf.IndexedSlices their values, or else all dense tensors."""
    tensors = given["tensors"] if "tensors" in given else [given["tensor"]]
    name = given.get("name")
    names = places(name, len(tensors)) if "tensors" in given else [name]
    for tensor, each in zip(tensors, names, strict=True):
        if isinstance(tensor, tf.IndexedSlices):
            return Kind.ALLGATHER, [each and f"{each}.values"]
    return Kind.ALLREDUCE, names


def _variables(given: Mapping[str, Any]) -> Name:
    return Kind.BROADCAST, places(given.get("name"), len(given["variables"]))


@refusable(_first, _current)
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
        tensor: any shape, equal on all ranks; or `tf.IndexedSlices`, whose slices of all ranks are joined.
        average: Horovod's old flag; use ``op``.
        device_dense: not needed.
        device_sparse: not needed.
        compression: what travels: one of `Compression`; gradients travel as they are.
        op: `Average` (default), `AveragePresent`, `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: applied to each rank's tensor before.
        postscale_factor: applied to the result.
        name: equal on all ranks; without one, operations match in the order in which they are started.
        process_set: the ranks that take part.
        ignore_name_scope: not needed.

    Raises:
        ArgumentError: the type does not allow the operation.
        MismatchError, DuplicateNameError, PeerError, ShutdownError: see `coordd.errors`; in a graph TensorFlow turns
            them into `tf.errors.UnknownError`, with the same text.
    """
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced([tensor], [name], compression, reduce_op(op, average), process_set, **factors)[0]


@refusable(_first, _current)
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
    names = places(name, len(tensors))
    return _reduced(tensors, names, compression, reduce_op(op, average), process_set, **factors)


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
    found: list[Any] = list(tensors)
    dense = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            if (prescale_factor, postscale_factor) != (1.0, 1.0):
                text = "prescale and postscale factors are not supported with tf.IndexedSlices: scale the values"
                raise ArgumentError(text)
            found[index] = _joined(tensor, names[index], op, process_set)
    if dense:
        small, contexts = zip(*(compressor.compress(check_dense(tensors[index])) for index in dense), strict=True)
        operation = Allreduce(
            api.source(),
            [names[index] for index in dense],
            process_set,
            op=op,
            prescale=prescale_factor,
            postscale=postscale_factor,
        )
        results, _ = differentiable(operation, small)
        for index, result, context in zip(dense, results, contexts, strict=True):
            found[index] = compressor.decompress(result, context)
    return found


def _joined(slices: tf.IndexedSlices, name: str | None, op: ReduceOp, process_set: ProcessSet) -> tf.IndexedSlices:
    """Adds up slices by joining those of all ranks; an index that several have is there several times."""
    if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
        text = f"{op.name.capitalize()} of tf.IndexedSlices is not supported: use Sum or Average, or convert_to_tensor"
        raise ArgumentError(text)
    members = process_set.count(api.size()) if op is ReduceOp.AVERAGE else 1
    values = allgather(slices.values, name and f"{name}.values", process_set=process_set)
    indices = allgather(slices.indices, name and f"{name}.indices", process_set=process_set)
    if members != 1:
        values = values / tf.cast(members, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@refusable(Kind.ALLGATHER, _current)
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Returns all ranks' tensors, joined along the first dimension, which may differ; differentiable.

    Raises:
        ArgumentError: the tensor has no dimension.
    """
    return _gathered([tensor], [name], process_set)[0]


@refusable(Kind.ALLGATHER, _current)
def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Returns several tensors, each joined as `allgather` does."""
    return _gathered(tensors, places(name, len(tensors)), process_set)


def _gathered(tensors: Tensors, names: Sequence[str | None], process_set: ProcessSet) -> list[tf.Tensor]:
    operation = Allgather(api.source(), names, process_set)
    found: list[tf.Tensor] = differentiable(operation, [check_dense(tensor) for tensor in tensors])[0]
    return found


@refusable(Kind.BROADCAST, _current)
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
        root_rank: the global rank whose values are taken.
        name: equal on all ranks.
        ignore_name_scope: not needed.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: the root is not one of them.
    """
    operation = Broadcast(api.source(), [name], process_set, root=root_rank)
    return differentiable(operation, [check_dense(tensor)])[0][0]


@refusable(_variables, _current)
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Copies the root's values into everybody's variables and returns these."""
    operation = Broadcast(api.source(), places(name, len(variables)), process_set, root=root_rank)
    values, _ = differentiable(operation, [check_dense(variable) for variable in variables])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return list(variables)


@refusable(Kind.ALLTOALL, _current)
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives each rank its rows and returns those that the ranks had for this one; differentiable.

    Args:
        tensor: of any number of rows, which are equal in shape and type on all ranks.
        splits: how many rows each rank gets, in the order of ranks; by default all get the same number.
        name: equal on all ranks.
        ignore_name_scope: not needed.
        process_set: the ranks that take part.

    Returns:
        the rows in the order of ranks; with splits, also how many rows each rank has sent.

    Raises:
        ArgumentError: the tensor has no dimension, or the splits do not fit.
    """
    given = [] if splits is None else [tf.convert_to_tensor(splits)]
    (rows,), kept = differentiable(Alltoall(api.source(), [name], process_set), [check_dense(tensor)], given)
    return rows if splits is None else (rows, tf.cast(kept[1], given[0].dtype))


@refusable(Kind.REDUCESCATTER, _current)
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
    """Returns this rank's rows of a reduction, the first ranks one more if need be; differentiable.

    Other arguments as in `allreduce`. Its gradient is that of Horovod: the gradients of all rows, times the number of
    ranks for a sum.
    """
    factors = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _scattered([tensor], [name], compression, op, process_set, **factors)[0]


@refusable(Kind.REDUCESCATTER, _current)
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
    """Returns this rank's rows of several reductions; arguments as in `reducescatter`."""
    factors = {"prescale": prescale_factor, "postscale": postscale_factor}
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


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have come."""
    source = api.source()

    def wait() -> list[np.ndarray]:
        source().barrier(process_set=process_set).result()
        return [np.array(0, np.int32)]

    call(wait, [], [tf.int32])


def join(process_set: ProcessSet = global_process_set) -> Any:
    """Waits until all ranks have joined, and takes part with nothing in whatever the others still do.

    Returns:
        the rank that joined last, which has done everything that any rank has: an integer, or in a graph a tensor.
    """
    source = api.source()

    def wait() -> list[np.ndarray]:
        return [source().join(process_set=process_set).result().astype(np.int32)]

    (last,) = call(wait, [], [tf.int32])
    last.set_shape([])
    return int(last) if tf.executing_eagerly() else last


def _asked(question: Callable[[World], int]) -> tf.Tensor:
    """Asks whenever the graph runs, for a graph may outlive a daemon."""
    source = api.source()
    (found,) = call(lambda: [np.array(question(source().daemon.world), np.int32)], [], [tf.int32])
    found.set_shape([])
    return found


def size_op(process_set_id: Any = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks, of all or of a set, asked when it is computed."""
    return _asked(lambda world: _set_of(process_set_id).count(world.size))


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this process's rank, asked when it is computed."""
    return _asked(lambda world: world.rank)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this process's place on its host, asked when it is computed."""
    return _asked(lambda world: world.local_rank)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host, asked when it is computed."""
    return _asked(lambda world: world.local_size)


def process_set_included_op(process_set_id: Any = 0, name: str | None = None) -> tf.Tensor:
    """Returns 1 if this rank is a member, else 0, asked when it is computed."""
    return _asked(lambda world: not (ranks := _set_of(process_set_id).ranks) or world.rank in ranks)


def _set_of(process_set_id: Any) -> ProcessSet:
    """Finds a set by `ProcessSet.process_set_id`, which names its members; Horovod's 0 is that of all ranks."""
    if process_set_id in {0, "all"}:
        return global_process_set
    return ProcessSet([int(rank) for rank in str(process_set_id).split(",")])
