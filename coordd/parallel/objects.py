"""Broadcasts and gathers arbitrary Python objects, pickled.

Objects come from ranks of this job, over the data plane, never from the control channel.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from coordd import api
from coordd.daemon.operations import Operations
from coordd.daemon.reject_on_all_ranks import Name, SecondOperation, refusable
from coordd.errors import RefusedError, brief
from coordd.ops.arguments import check_rank
from coordd.ops.messages import Kind
from coordd.ops.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object", "gathered", "sizes_of"]


def _sized(name: str | None) -> str | None:
    """Returns the name of the first of the two operations, which carries the size of the second."""
    return name and f"{name}.sz"


def _names(operations: Operations, kind: Kind, name: str | None, process_set: ProcessSet) -> tuple[str, str]:
    """Returns the names of both operations; without a name, the call takes one number, however far it comes."""
    first = _sized(name) or operations.number(kind, process_set)
    return first, f"{name or first}.t"


def sizes_of(kind: Kind) -> Callable[[Mapping[str, Any]], Name]:
    """Returns a function that finds the first operation of these functions: that of the sizes."""

    def find(given: Mapping[str, Any]) -> Name:
        return kind, [_sized(given.get("name"))]

    return find


@refusable(sizes_of(Kind.BROADCAST), api.operations)
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's object on all ranks.

    Args:
        obj: anything that can be pickled; ignored on ranks other than the root.
        root_rank: the global rank whose object is taken.
        name: equal on all ranks.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: the root is not one of them.
        RefusedError: on the other ranks: the root's object cannot be pickled. The root raises the error of `pickle`.
    """
    operations = api.operations()
    root_rank = check_rank(root_rank)
    root = api.rank() == root_rank
    data, error = _pickled(obj, root_rank) if root else (np.empty(0, np.uint8), None)
    size = np.array([data.size])
    title, second = _names(operations, Kind.BROADCAST, name, process_set)
    with SecondOperation(operations, Kind.BROADCAST, second, process_set) as block:
        block.first = operations.broadcast(size, root_rank, name=title, process_set=process_set)
        block.first.result()
        if not root:
            data = np.empty(size[0], np.uint8)
        handle = operations.broadcast(data, root_rank, name=second, process_set=process_set)
    handle.result()
    if error is not None:
        raise error
    return obj if root else _checked([pickle.loads(data.data)])[0]  # noqa: S301 - see the head of this file


@refusable(sizes_of(Kind.ALLGATHER), api.operations)
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns all ranks' objects, in the order of ranks.

    Raises:
        RefusedError: another rank's object cannot be pickled; that rank raises the error of `pickle`.
    """
    return gathered(api.operations(), obj, name, process_set)


def gathered(operations: Operations, obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Implements `allgather_object` with the given operations."""
    data, error = _pickled(obj, operations.daemon.world.rank)
    size = np.array([data.size])
    title, second = _names(operations, Kind.ALLGATHER, name, process_set)
    with SecondOperation(operations, Kind.ALLGATHER, second, process_set) as block:
        block.first = operations.allgather(size, name=title, process_set=process_set)
        block.first.result()
        handle = operations.allgather(data, name=second, process_set=process_set, sized=True, land=_pair)
    joined, sizes = handle.result()
    if error is not None:
        raise error
    stops = itertools.accumulate(filter(None, sizes.tolist()), initial=0)  # a joined rank has no object
    found = [pickle.loads(joined[start:stop].data) for start, stop in itertools.pairwise(stops)]  # noqa: S301 - as above
    return _checked(found)


def _pair(rows: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows, sizes


class _Refusal:
    """Travels in place of an object that could not be pickled."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason


def _pickled(obj: Any, rank: int) -> tuple[np.ndarray, Exception | None]:
    """Pickles an object, or in its place a refusal with the reason; returns also the error, if any."""
    error = None
    try:
        data = _dumped(obj)
    except Exception as found:  # noqa: BLE001 - whatever a class's own pickling raises
        error = found
        data = pickle.dumps(_Refusal(rank, f"has an object that cannot be pickled: {brief(found)}"))
    return np.frombuffer(bytearray(data), np.uint8), error


def _dumped(obj: Any) -> bytes:
    """Pickles an object; like Horovod, falls back to cloudpickle, where installed, if `pickle` fails."""
    try:
        return pickle.dumps(obj)
    except Exception:
        if not api.operations().as_horovod or find_spec("cloudpickle") is None:
            raise
    import cloudpickle

    return bytes(cloudpickle.dumps(obj))


def _checked(objects: list[Any]) -> list[Any]:
    """Returns the objects received from the ranks.

    Raises:
        RefusedError: one of them could not be pickled.
    """
    for obj in objects:
        if isinstance(obj, _Refusal):
            raise RefusedError(obj.rank, obj.reason)
    return objects
