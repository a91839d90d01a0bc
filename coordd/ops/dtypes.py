"""Dtypes by name, including those that NumPy itself lacks. Pure."""

from __future__ import annotations

import ast
import functools
from typing import Any

import numpy as np

__all__ = ["digits_of", "dtype_of"]


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the dtype for a name as in `numpy.dtype.name`, or for the list of its fields.

    Dtypes that NumPy lacks, such as ``bfloat16``, are imported only here: the import takes a megabyte.

    Raises:
        TypeError: there is no such dtype.
    """
    try:
        return np.dtype(ast.literal_eval(name) if name.startswith(("[", "{")) else name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name, name))


def digits_of(dtype: np.dtype[Any]) -> float:
    """Returns the distance from 1 to the next number of a dtype; 0 for integers and booleans."""
    if dtype.kind in "biu":
        return 0.0
    try:
        return float(np.finfo(dtype).eps)
    except ValueError:
        import ml_dtypes

        found: Any = ml_dtypes.finfo
        return float(found(dtype).eps)
