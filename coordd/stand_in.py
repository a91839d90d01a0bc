"""What a rank that has joined takes part with: nothing, in the form that the operation wants. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from coordd.dtypes import dtype_of
from coordd.messages import Kind, ReduceOp, Request
from coordd.table import Entry

__all__ = ["stand_in"]


class _Nobody:
    """A handle for which nobody waits."""

    submitted = math.inf

    def __init__(self, name: str) -> None:
        self.name = name

    def land(self, value: Any, convert: Any) -> None:
        """Drops what has arrived."""

    def resolve(self, result: Any) -> None:
        """Drops it."""

    def fail(self, error: BaseException) -> None:
        """Drops it: whoever has submitted something is told."""


def stand_in(request: Request) -> Entry:
    """Makes an entry that changes nothing: the neutral element of a reduction, no rows, or room for what is sent."""
    dtype = dtype_of(request.dtype)
    shape = request.shape
    if request.kind is Kind.ALLGATHER:
        shape = (0, *shape[1:])
    array = np.empty(shape, dtype)
    if array.size:
        array[...] = _neutral(request.op, dtype)
    entry = Entry(request, array, _Nobody(request.name))
    entry.patient = True
    return entry


def _neutral(op: ReduceOp, dtype: np.dtype) -> Any:
    """What a reduction does not notice."""
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in {ReduceOp.MIN, ReduceOp.MAX}:
        return 0
    if dtype.kind == "b":
        return op is ReduceOp.MIN
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return np.inf if op is ReduceOp.MIN else -np.inf
