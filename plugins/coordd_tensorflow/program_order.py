"""Keeps operations that wait for other ranks in program order, also across calls of functions in a graph.

TensorFlow runs the operations with side effects of one function in program order. It knows which variables a function
reads and writes, and orders calls of functions by these: calls that only read variables run in any order, or at the
same time, whatever else they contain. Ranks would then pair one call with another. So TensorFlow is told of one more
resource, which every operation with side effects writes, and every call of a function that contains a Python function.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps

__all__ = ["after_last_wait", "note_wait"]

_PYTHON = frozenset({"PyFunc", "EagerPyFunc"})
_CALLS = frozenset({"StatefulPartitionedCall", "If", "While", "Case"})  # their forms without state contain none
_LAST = "coordd_last_wait"


class _Resource:
    """The additional resource, with the attributes of a resource's tensor that TensorFlow reads."""

    op = SimpleNamespace(type="CoorddProgramOrder")
    _id = -1


_RESOURCE = _Resource()
_has_python: dict[str, bool] = {}
"""Whether functions contain a Python function, by their names, which are unique in a process."""


@auto_control_deps.register_acd_resource_resolver
def _resources(operation: Any, reads: Any, writes: Any) -> bool:
    """Adds the resource to what an operation writes; returns whether it was missing.

    Operations without resources stay in the order in which TensorFlow keeps them among themselves.
    """
    if _RESOURCE in writes:
        return False
    if operation.type in _CALLS:
        wanted = any(_contains_python(operation.graph, name) for name in _functions(operation.node_def))
    else:
        alone = not reads and not writes and operation._control_flow_context is None  # noqa: SLF001 - as TensorFlow asks
        wanted = alone and auto_control_deps.op_is_stateful(operation)
    if wanted:
        writes.add(_RESOURCE)
    return bool(wanted)


def _functions(node: Any) -> Iterator[str]:
    """Yields the names of the functions that a node may call."""
    for attribute in node.attr.values():
        if attribute.HasField("func"):
            yield attribute.func.name
        yield from (function.name for function in attribute.list.func)


def _contains_python(graph: Any, name: str) -> bool:
    """Returns whether a function, or one that it calls, contains a Python function, which may wait."""
    if name not in _has_python:
        _has_python[name] = False  # for a function that calls itself
        _has_python[name] = any(
            node.op in _PYTHON
            or (node.op in _CALLS and any(_contains_python(graph, inner) for inner in _functions(node)))
            for node in _definition(graph, name).node_def
        )
    return _has_python[name]


def _definition(graph: Any, name: str) -> Any:
    """Returns the definition of a function: of this graph or one around it, or of the process."""
    while graph is not None:
        if (found := graph._get_function(name)) is not None:  # noqa: SLF001 - TensorFlow has no other way
            return found.cached_definition
        graph = getattr(graph, "outer_graph", None)
    return context.get_function_def(name)


def after_last_wait() -> Any:
    """Returns a context: an operation created in it runs after the last operation of this graph that waits.

    Graphs of backward passes may not be ordered by TensorFlow at all.
    """
    last = getattr(tf.compat.v1.get_default_graph(), _LAST, None)
    return tf.control_dependencies([] if last is None else [last])


def note_wait(operation: Any) -> None:
    """Records the operation that waits; a function that contains it ends after it."""
    graph = operation.graph
    if not getattr(graph, "building_function", False):
        return  # the graph of a session, which runs only the operations that the script fetches
    setattr(graph, _LAST, operation)
    if not graph._add_control_dependencies:  # noqa: SLF001 - otherwise TensorFlow adds it itself
        graph.control_outputs.append(operation)
