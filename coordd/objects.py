"""Any Python objects of the ranks, pickled: one rank's for all, or all ranks' for all.

Objects come from ranks of this job, over the data plane, never from the control channel.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np

from coordd import api
from coordd.operations import Operations
from coordd.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object", "gathered"]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's object on all ranks.

    Args:
        obj: anything that can be pickled; on other ranks than the root it is ignored.
        root_rank: the global rank whose object is taken.
        name: equal on all ranks.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: the root is not one of them.
    """
    operations = api.operations()
    root = api.rank() == root_rank
    data = _pickled(obj) if root else np.empty(0, np.uint8)
    size = np.array([data.size])
    operations.broadcast(size, root_rank, name=name and f"{name}.sz", process_set=process_set).result()
    if not root:
        data = np.empty(size[0], np.uint8)
    operations.broadcast(data, root_rank, name=name and f"{name}.t", process_set=process_set).result()
    return obj if root else pickle.loads(data.data)  # noqa: S301 - see the head of this file


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns all ranks' objects, in the order of ranks; each must be picklable."""
    return gathered(api.operations(), obj, name, process_set)


def gathered(operations: Operations, obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Does what `allgather_object` does, by these operations."""
    data = _pickled(obj)
    size = np.array([data.size])
    sizes = operations.allgather(size, name=name and f"{name}.sz", process_set=process_set).result()
    joined = operations.allgather(data, name=name and f"{name}.t", process_set=process_set).result()
    stops = itertools.accumulate(sizes.tolist(), initial=0)
    return [pickle.loads(joined[start:stop].data) for start, stop in itertools.pairwise(stops)]  # noqa: S301 - as above


def _pickled(obj: Any) -> np.ndarray:
    return np.frombuffer(bytearray(pickle.dumps(obj)), np.uint8)
