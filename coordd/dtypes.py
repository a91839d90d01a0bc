"""Types of numbers by their names, those among them that NumPy itself does not have. Pure."""

from __future__ import annotations

import ast
import functools
from typing import Any

import numpy as np

__all__ = ["digits_of", "dtype_of"]


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Finds a type by the name that `numpy.dtype.name` gives it, or by its fields.

    What NumPy lacks, such as ``bfloat16``, is imported only here: it takes a megabyte.

    Raises:
        TypeError: there is no such type.
    """
    try:
        return np.dtype(ast.literal_eval(name) if name.startswith(("[", "{")) else name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name, name))


def digits_of(dtype: np.dtype[Any]) -> float:
    """Returns the distance from one to the next number of a type; 0 for whole numbers."""
    if dtype.kind in "biu":
        return 0.0
    try:
        return float(np.finfo(dtype).eps)
    except ValueError:
        import ml_dtypes

        found: Any = ml_dtypes.finfo
        return float(found(dtype).eps)
