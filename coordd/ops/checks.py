"""Checks of numeric arguments, such as counts, ranks and factors, each with one error message."""

from __future__ import annotations

import math
from operator import index
from typing import Any, SupportsIndex

from coordd.errors import ArgumentError

__all__ = ["finite", "whole"]


def whole(value: SupportsIndex, what: str, *, least: int | None = None) -> int:
    """Converts any integer, such as NumPy's, to Python's `int`, which messages carry.

    Args:
        value: the integer; neither a bool nor a float with an integral value.
        what: its name.
        least: the smallest legal value.

    Raises:
        ArgumentError: naming the given value and the legal ones.
    """
    try:
        found = None if type(value).__name__ in {"bool", "bool_"} else int(index(value))
    except TypeError:
        found = None
    if found is None or (least is not None and found < least):
        bound = "" if least is None else f" of {least} or more"
        raise ArgumentError(f"{what} is a whole number{bound}, not {_shown(value)}")
    return found


def finite(value: Any, what: str, *, above: float = -math.inf) -> float:
    """Converts any real number to a float.

    Args:
        value: the number; neither a bool nor text.
        what: its name.
        above: exclusive lower bound.

    Raises:
        ArgumentError: it is out of range, infinite, NaN, or not a number at all.
    """
    if type(value) is float and above < value < math.inf:  # the common case, once or twice per operation
        return value
    try:
        found = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (math.isfinite(found) and found > above):
        bound = f" above {above:g}" if above > -math.inf else ""
        raise ArgumentError(f"{what} is a finite number{bound}, not {_shown(value)}")
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
