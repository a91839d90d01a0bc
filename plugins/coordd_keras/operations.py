"""Collective operations on Keras tensors, arrays and variables, on any backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from coordd import api
from coordd.daemon.reject_on_all_ranks import refusable
from coordd.ops.arguments import check_op, listed, places, reduce_op
from coordd.ops.handles import wait_all
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet, check_process_set, global_process_set
from coordd.parallel.collective_calls import CollectiveCall, collective
from coordd.parallel.parameter_list import Inventory
from coordd_keras.compression import Compression, compressor

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "copy_variables",
    "reducescatter",
]


def _array(value: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(value), order="C")


def _common(array: np.ndarray) -> np.ndarray:
    """Widens integers to int64, because the backends use different integer types for the same variable."""
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


@refusable(Kind.ALLREDUCE, api.operations)
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray:
    """Returns the reduction of a value over all ranks, by default its average.

    Args:
        value: a tensor, an array or a number; equal in shape on all ranks.
        name: of the operation; equal on all ranks.
        average: Horovod's old flag; use ``op``.
        prescale_factor: applied to each rank's value before the reduction.
        postscale_factor: applied to the result.
        op: `Average` (default), `Sum`, `Min`, `Max`, `Product`, `AveragePresent` or `Adasum`.
        compression: one of `Compression`, or a class with Horovod's functions.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: `compression` is not a compressor, or it needs its own protocol, which only `coordd.torch`
            supports.
    """
    if compression != Compression.none:
        way = compressor(compression)
        small, context = way.compress(keras.ops.convert_to_tensor(value))
        reduced = allreduce(small, name, average, prescale_factor, postscale_factor, op, process_set=process_set)
        return _array(way.decompress(keras.ops.convert_to_tensor(reduced), context))
    found: np.ndarray = (
        api.operations()
        .allreduce(
            _array(value),
            name=name,
            op=reduce_op(op, average),
            prescale=prescale_factor,
            postscale=postscale_factor,
            process_set=process_set,
        )
        .result()
    )
    return found


@refusable(Kind.ALLGATHER, api.operations)
def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> np.ndarray:
    """Returns the values of all ranks, concatenated along the first dimension."""
    return api.allgather(_array(value), name=name, process_set=process_set)


@refusable(Kind.BROADCAST, api.operations)
def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray:
    """Returns the root's value."""
    return api.broadcast(_array(value), root_rank, name=name, process_set=process_set)


@refusable(Kind.REDUCESCATTER, api.operations)
def reducescatter(
    value: Any,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray:
    """Returns this rank's rows of the reduced value; arguments as in `allreduce`."""
    found: np.ndarray = (
        api.operations()
        .reducescatter(
            _array(value),
            name=name,
            op=check_op(op),
            prescale=prescale_factor,
            postscale=postscale_factor,
            process_set=process_set,
        )
        .result()
    )
    return found


@collective("broadcast_variables")
def broadcast_variables(
    _call: CollectiveCall, variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Copies the root's values into the variables of all ranks, such as ``model.variables``.

    Raises:
        ArgumentError: `variables` is not a list of variables, or the root is not in the process set.
        MismatchError: the ranks pass different variables; nothing is copied then.
        RefusedError: another rank raised an error in this call.
    """
    check_process_set(process_set, api.size())
    copy_variables(listed(variables, ("assign", "name"), keras.Variable), root_rank, process_set)


def copy_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Does the work of `broadcast_variables`, inside a collective call of all ranks of the process set."""
    operations, name = api.operations(), "broadcast.variables"
    lines = [f"{index}. {variable.name} {tuple(variable.shape)}" for index, variable in enumerate(variables)]
    Inventory(operations, lines, caller="broadcast_variables", name=name, process_set=process_set).check()
    arrays = [_common(_array(variable)) for variable in variables]
    named = zip(arrays, places(name, len(arrays)), strict=True)
    wait_all([operations.broadcast(array, root_rank, name=each, process_set=process_set) for array, each in named])
    if api.rank() != root_rank:
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)


@collective("broadcast_global_variables", everywhere=True)
def broadcast_global_variables(_call: CollectiveCall, root_rank: int = 0, model: Any = None) -> None:
    """Copies the root's variables to all ranks.

    Args:
        root_rank: the global rank whose variables are copied.
        model: its variables and those of its optimizer are copied; Keras 3 keeps no list of all variables.

    Raises:
        TypeError: no model was given.
        ArgumentError, MismatchError, RefusedError: as for `broadcast_variables`.
    """
    if model is None:
        text = "Keras 3 keeps no list of all variables: give the model, as in broadcast_global_variables(0, model)"
        raise TypeError(text)
    optimizer = getattr(model, "optimizer", None)
    copy_variables([*model.variables, *(optimizer.variables if optimizer else ())], root_rank)
