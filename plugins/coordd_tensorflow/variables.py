"""Making all ranks start from the same variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from coordd import api, objects
from coordd.arguments import listed
from coordd.calls import CollectiveCall, collective
from coordd.inventory import Inventory
from coordd.messages import Kind
from coordd.process_sets import ProcessSet, check_process_set, global_process_set
from coordd.refusing import refusable
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
    """Copies the root's values into everybody's variables.

    Args:
        variables: TensorFlow's or Keras's; on all ranks the same, in the same order.
        root_rank: the global rank whose values are taken.
        process_set: the ranks that take part.
        inplace: not needed.

    Raises:
        ArgumentError: what is given is no list of variables, or the root is no member.
        MismatchError: the ranks have given different variables; nothing is copied then.
        RefusedError: another rank has raised an error here.
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
        obj: anything that can be pickled; on other ranks than the root it is ignored.
        root_rank: the global rank whose object is taken.
        session: Horovod's; not needed.
        name: equal on all ranks.
        process_set: the ranks that take part.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


@refusable(objects.sizes_of(Kind.ALLGATHER), api.operations)
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns all ranks' objects, in the order of ranks; each must be picklable. ``session`` is not needed."""
    return objects.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns the function that broadcasts an object, with the other arguments of `broadcast_object` given."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)
