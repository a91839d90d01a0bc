"""Argument checks of operations: made on the caller's line, before anything is announced."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np

from coordd.errors import ArgumentError
from coordd.ops.checks import whole
from coordd.ops.handles import call_site
from coordd.ops.messages import Kind, ReduceOp

__all__ = [
    "backward_names",
    "check_name",
    "check_op",
    "check_rank",
    "check_reducible",
    "check_rows",
    "check_splits",
    "check_writable",
    "listed",
    "name_of",
    "no_gradient",
    "places",
    "read_groups",
    "reduce_op",
]

_LONGEST_NAME = 1024


def check_reducible(dtype: np.dtype[Any], op: ReduceOp, *, scaled: bool, truncate: bool = False) -> None:
    """Rejects reductions that would be wrong or meaningless.

    Args:
        dtype: the type of the tensor.
        op: the reduction.
        scaled: whether a prescale or postscale factor is not 1.
        truncate: whether averages and scales of integers are truncated, as Horovod does, instead of rejected.

    Raises:
        ArgumentError: naming the dtype, the operation and what to use instead.
    """
    if why := _why_not(dtype, op, scaled=scaled, truncate=truncate):
        text = f"Tensor type {name_of(dtype)} is not supported for {op.name.lower()}: {why}"
        raise ArgumentError(text)


@functools.cache
def _why_not(dtype: np.dtype[Any], op: ReduceOp, *, scaled: bool, truncate: bool) -> str:
    return _unusable(dtype) or _meaningless(dtype, op, scaled=scaled, truncate=truncate)


def _unusable(dtype: np.dtype[Any]) -> str:
    """Returns why a type cannot be reduced at all; "" if it can."""
    if name_of(dtype).startswith("float8"):
        return "eight-bit floats cannot be added up: reduce in bfloat16 and convert"
    if dtype.kind not in "?biufc" and name_of(dtype) != "bfloat16":
        return "use a numeric type"
    return ""


def _meaningless(dtype: np.dtype[Any], op: ReduceOp, *, scaled: bool, truncate: bool) -> str:
    """Returns why a type cannot be reduced with this operation; "" if it can."""
    inexact = dtype.kind in "fc" or name_of(dtype) == "bfloat16"
    divisible = inexact or (truncate and dtype.kind in "iu")
    reasons = (
        (
            dtype.kind == "b" and (op is ReduceOp.SUM or op.averages),
            "use Max for 'any', Min for 'all', or convert to integers to count",
        ),
        (op.averages and not divisible, "an average of integers would be truncated: use Sum, or convert to a float"),
        (op is ReduceOp.ADASUM and (not inexact or dtype.kind == "c"), "Adasum weighs real gradients: use a float"),
        (scaled and not divisible, "prescale and postscale factors would be truncated: convert to a float"),
        (dtype.kind == "c" and op in {ReduceOp.MIN, ReduceOp.MAX}, "complex numbers have no order"),
    )
    return next((why for holds, why in reasons if holds), "")


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Returns a type's name, cached because NumPy composes it anew each time; a structured type's with its fields."""
    return str(np.dtype((np.void, dtype))) if issubclass(dtype.type, np.void) else dtype.name


def check_writable(array: np.ndarray, kind: Kind) -> None:
    """Rejects a read-only array: reductions and broadcasts of arrays are in place."""
    if not array.flags.writeable:
        text = f"{kind.name.lower()} of a read-only array, which is changed in place: give a copy, as array.copy()"
        raise ArgumentError(text)


def check_rows(array: np.ndarray, name: str | None, kind: Kind) -> int:
    """Returns the number of rows of an array that is concatenated or split along its first dimension."""
    if not array.ndim:
        text = (
            f"tried to {kind.name} a rank-zero tensor ({name or 'unnamed'}): give it a first dimension, as in x[None]"
        )
        raise ArgumentError(text)
    return len(array)


def check_splits(splits: Any, rows: int, members: int) -> np.ndarray:
    """Returns the number of rows for each member, as a new int64 array."""
    if splits is None:
        if rows % members:
            text = (
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers: "
                f"{rows} rows for {members} ranks"
            )
            raise ArgumentError(text)
        return np.full(members, rows // members, np.int64)
    found = np.array(splits)
    if found.ndim != 1:
        text = f"alltoall expects a 1D splits tensor, not one of shape {found.shape}"
    elif found.dtype.kind not in "iu" and found.size:
        text = f"alltoall expects splits to contain integer elements, not {found.dtype}"
    elif len(found) != members:
        text = f"Number of entries in splits does not equal number of workers: {len(found)} for {members} ranks"
    elif (found < 0).any():
        text = f"alltoall expects splits of 0 or more rows, not {found.tolist()}"
    elif sum(found.tolist()) > rows:
        text = f"Sum of splits entries is greater than the first dimension of tensor: {found.tolist()}, {rows} rows"
    else:
        return found.astype(np.int64)
    raise ArgumentError(text)


def check_name(name: str) -> str:
    """Checks that a name can be sent to all ranks; returns it."""
    if not isinstance(name, str):
        text = f"a name is a string, not {name!r}"
        raise ArgumentError(text)
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        text = f"the name {name[:40]!r} cannot be written in UTF-8"
        raise ArgumentError(text) from error
    if not 1 <= length <= _LONGEST_NAME:
        text = f"a name has 1 to {_LONGEST_NAME} bytes; this one has {length}: {name[:40]!r}"
        raise ArgumentError(text)
    return str(name)


def check_rank(number: int) -> int:
    """Converts any integer, such as NumPy's, to Python's `int`, which messages carry.

    Raises:
        ArgumentError: it is not an integer.
    """
    return whole(number, "a rank")


def check_op(op: ReduceOp) -> ReduceOp:
    """Converts an operation or its number to `ReduceOp`.

    Raises:
        ArgumentError: it is neither, or another library's operation, whose numbers mean other operations.
    """
    if type(op) is ReduceOp:
        return op
    text = f"op is {op!r}, and must be Average, Sum, Adasum, Min, Max, Product or AveragePresent, of coordd"
    if not isinstance(op, int | np.integer):
        raise ArgumentError(text)
    try:
        return ReduceOp(whole(op, "op"))
    except ValueError as error:
        raise ArgumentError(text) from error


def reduce_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:  # noqa: FBT001 - Horovod's flag, read here
    """Returns the operation of ``op`` or of the older flag ``average``."""
    if average is not None:
        if op is not None:
            text = "The op parameter supersedes average. Please provide only one of them."
            raise ArgumentError(text)
        if not isinstance(average, bool | np.bool_):
            text = f"average is {average!r}, and must be True or False: say op=Sum, name='loss' by their names"
            raise ArgumentError(text)
        text = "Parameter `average` has been replaced with `op` and will be removed in v1.0"
        warnings.warn(text, DeprecationWarning, stacklevel=_level())
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    return ReduceOp.AVERAGE if op is None else check_op(op)


def read_groups(num_groups: int, groups: Any) -> tuple[int, Any]:
    """Converts Horovod's old argument ``num_groups`` to ``groups``, with its warning; for ``as_horovod``."""
    if not num_groups:
        return num_groups, groups
    text = "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0."
    warnings.warn(text, DeprecationWarning, stacklevel=_level())
    return (num_groups, None) if groups is None else (0, groups)


def _level() -> int:
    """Returns the ``stacklevel`` of the user's line for `warnings.warn` in the caller."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the callers
    site, level = call_site(frame), 1
    while frame is not None and (frame.f_code, frame.f_lineno) != site:
        frame, level = frame.f_back, level + 1
    return level


def places(name: str | None, count: int) -> list[str | None]:
    """Returns the names of a group's operations, each with its index in the group."""
    return [name and f"{name}_{index}of{count}" for index in range(count)]


def backward_names(names: Sequence[str | None]) -> list[str | None]:
    """Returns the names of the operations that reduce the gradients of named operations."""
    return [name and f"{name}.grad" for name in names]


def no_gradient(op: ReduceOp) -> ArgumentError:
    """Returns the error of a backward pass through a reduction that is not linear."""
    name = op.name.capitalize()
    return ArgumentError(
        f"{name} has no gradient here: reduce tensor.detach() or tf.stop_gradient(tensor), or use Sum or Average"
    )


def listed(variables: Any, attributes: Sequence[str], *single: type) -> list[Any]:
    """Returns the user's variables as a list, for plugins.

    Args:
        variables: any iterable of variables.
        attributes: attributes that a variable has.
        single: iterable types that are not a list of variables.

    Raises:
        ArgumentError: it is not a list of variables.
    """
    if not isinstance(variables, Iterable) or isinstance(variables, (str, bytes, Mapping, *single)):
        text = f"broadcast_variables wants a list of variables, such as model.variables, not {type(variables).__name__}"
        raise ArgumentError(text)
    found = list(variables)
    for variable in found:
        if not all(hasattr(variable, attribute) for attribute in attributes):
            text = f"broadcast_variables wants variables, and a {type(variable).__name__} is none"
            raise ArgumentError(text)
    return found
