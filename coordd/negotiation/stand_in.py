"""Builds the placeholder that a joined rank contributes: nothing, in the form that the operation needs. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from coordd.negotiation.tensor_table import Entry
from coordd.ops.dtypes import dtype_of
from coordd.ops.messages import Kind, ReduceOp, Request

__all__ = ["stand_in"]


class _Nobody:
    """A handle for which no thread waits."""

    submitted = math.inf

    def __init__(self, name: str) -> None:
        self.name = name

    def land(self, value: Any, convert: Any) -> None:
        """Drops the result."""

    def resolve(self, result: Any) -> None:
        """Drops the result."""

    def fail(self, error: BaseException) -> None:
        """Drops the error: the ranks that have submitted the operation get it."""


def stand_in(request: Request) -> Entry:
    """Returns an entry that changes nothing: a reduction's neutral element, no rows, or a receive buffer."""
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
    """Returns the neutral element of a reduction."""
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
