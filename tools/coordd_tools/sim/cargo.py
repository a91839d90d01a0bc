"""Values for simulated collectives that identify their origin, and the results they must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coordd.ops.dtypes import dtype_of
from coordd.ops.messages import Kind, ReduceOp, Request

__all__ = ["expected", "fill"]

_FIRST = 11


def fill(array: np.ndarray, key: int, rank: int) -> None:
    """Fills an array with small integers that differ by operation, rank and position.

    Sums of sixty-four of them are exact in sixteen bits. Gradients for Adasum are equal on all ranks, and therefore so
    is their adaptive sum.
    """
    first = (key * 5 + rank * 3) % _FIRST
    array[...] = np.arange(first, first + array.size).reshape(array.shape) % (_FIRST + array.size % 2)


def expected(
    request: Request, inputs: Mapping[int, np.ndarray], rank: int, splits: Mapping[int, Sequence[int]] | None = None
) -> np.ndarray:
    """Returns the result that an operation must have on a rank.

    Args:
        request: the operation.
        inputs: by rank, ascending, the submitted arrays; joined ranks have none.
        rank: the rank that gets the result.
        splits: for an alltoall, by rank, the number of rows it has for each member.
    """
    match request.kind:
        case Kind.ALLREDUCE:
            return _reduced(request, list(inputs.values()))
        case Kind.ALLGATHER:
            return np.concatenate([inputs[other] for other in sorted(inputs)])
        case Kind.BROADCAST:
            return inputs[request.root]
        case Kind.ALLTOALL:
            return _received(inputs, request.members, rank, splits or {})
        case Kind.REDUCESCATTER:
            blocks = np.array_split(_reduced(request, list(inputs.values())), len(request.members))
            return blocks[request.members.index(rank)]
        case _:
            return np.empty(0)


def _reduced(request: Request, parts: Sequence[np.ndarray]) -> np.ndarray:
    if request.op is ReduceOp.ADASUM:
        return parts[0]
    scaled = [part.copy() for part in parts]
    if request.prescale != 1.0:
        for part in scaled:
            np.multiply(part, request.prescale, out=part, casting="unsafe")
    dtype = dtype_of(request.dtype)
    wide = [part.astype(np.float64) for part in scaled]
    total = np.maximum.reduce(wide) if request.op is ReduceOp.MAX else np.add.reduce(wide)
    return np.asarray(total).astype(dtype)


def _received(
    inputs: Mapping[int, np.ndarray], members: Sequence[int], rank: int, splits: Mapping[int, Sequence[int]]
) -> np.ndarray:
    place = members.index(rank)
    parts = []
    for other in sorted(inputs):
        if rows := splits.get(other, ()):
            start = sum(rows[:place])
            parts.append(inputs[other][start : start + rows[place]])
    return np.concatenate(parts) if parts else next(iter(inputs.values()))[:0]
