"""Broadcasts variables and objects, so that all ranks start with the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from coordd import api
from coordd.daemon.reject_on_all_ranks import refusable
from coordd.ops.arguments import listed
from coordd.ops.messages import Kind
from coordd.ops.process_sets import ProcessSet, check_process_set, global_process_set
from coordd.parallel import objects
from coordd.parallel.collective_calls import CollectiveCall, collective
from coordd.parallel.parameter_list import Inventory
from coordd_tensorflow.exchange import name_of
from coordd_tensorflow.operations import broadcast_

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]


@collective("broadcast_variables")
def broadcast_variables(
    _call: CollectiveCall,
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Copies the root's values into the variables of all ranks.

    Args:
        variables: of TensorFlow or Keras; the same on all ranks, in the same order.
        root_rank: the global rank whose values are copied.
        process_set: the ranks that take part.
        inplace: ignored.

    Raises:
        ArgumentError: `variables` is not a list of variables, or the root is not in the process set.
        MismatchError: the ranks pass different variables; nothing is copied then.
        RefusedError: another rank raised an error in this call.
    """
    check_process_set(process_set, api.size())
    variables = listed(variables, ("assign", "shape"), tf.Tensor, tf.Variable)
    lines = [f"{index}. {name_of(variable, index)} {variable.shape}" for index, variable in enumerate(variables)]
    name = "broadcast.variables"
    inventory = Inventory(api.operations(), lines, caller="broadcast_variables", name=name, process_set=process_set)
    inventory.check()
    if variables:
        broadcast_(variables, root_rank, name=name, process_set=process_set)


@refusable(objects.sizes_of(Kind.BROADCAST), api.operations)
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on all ranks.

    Args:
        obj: any picklable object; ignored on other ranks than the root.
        root_rank: the global rank whose object is returned.
        session: as in Horovod; ignored.
        name: equal on all ranks.
        process_set: the ranks that take part.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


@refusable(objects.sizes_of(Kind.ALLGATHER), api.operations)
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in rank order; each must be picklable. ``session`` is ignored."""
    return objects.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function that broadcasts an object, with the other arguments of `broadcast_object` bound."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)
