"""Numbers as arguments: what a count, a rank or a factor can be, and one sentence for what it cannot."""

from __future__ import annotations

import math
from operator import index
from typing import Any, SupportsIndex

from coordd.errors import ArgumentError

__all__ = ["finite", "whole"]


def whole(value: SupportsIndex, what: str, *, least: int | None = None) -> int:
    """Takes any integer, such as NumPy's, as Python's own, which is what messages carry.

    Args:
        value: the integer; a truth value is none, and neither is a float that happens to be whole.
        what: its name.
        least: the smallest that is legal.

    Raises:
        ArgumentError: naming what was given and what is legal.
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
    """Takes any real number as a float.

    Args:
        value: the number; neither a truth value nor text.
        what: its name.
        above: what it must be larger than.

    Raises:
        ArgumentError: it is none, is infinite, or is no number at all.
    """
    if type(value) is float and above < value < math.inf:  # most often, and once or twice for each operation
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
