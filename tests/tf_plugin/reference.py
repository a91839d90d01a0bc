"""What a single process would compute: every rank can make every rank's array, and so the expected result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import coordd.tensorflow as cd
from coordd.ops.dtypes import dtype_of

__all__ = ["DTYPES", "FLOATS", "everyones", "graph", "mine", "reduced", "ways"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *(*FLOATS, "complex64", "complex128"),
)
_REDUCE = {cd.Sum: np.add, cd.Average: np.add, cd.Min: np.minimum, cd.Max: np.maximum, cd.Product: np.multiply}


def everyones(dtype: str = "float32", shape: tuple[int, ...] = (5, 3), *, seed: int = 0) -> list[np.ndarray]:
    """The arrays of all ranks, in the order of ranks."""
    return [_array(dtype, shape, seed * 1000 + rank) for rank in range(cd.size())]


def mine(dtype: str = "float32", shape: tuple[int, ...] = (5, 3), *, seed: int = 0) -> tf.Tensor:
    """This rank's among them."""
    return tf.constant(everyones(dtype, shape, seed=seed)[cd.rank()])


def reduced(arrays: list[np.ndarray], op: Any = cd.Sum) -> np.ndarray:
    """Their reduction, computed in the widest type of their kind and rounded once."""
    dtype = arrays[0].dtype
    kind = {"c": np.complex128, "b": np.bool_, "u": np.uint64, "i": np.int64}.get(dtype.kind, np.float64)
    found = _REDUCE[op].reduce([array.astype(kind) for array in arrays])
    return (found / len(arrays) if op is cd.Average else found).astype(dtype)


def graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a graph, which runs once more than it is traced."""
    traced = tf.function(function)

    def twice(*args: Any) -> Any:
        traced(*args)
        return traced(*args)

    return twice


def ways(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The function at once, and as a graph."""
    return [function, graph(function)]


def _array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    kind = dtype_of(dtype)
    if kind.kind == "c":
        return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(kind)
    if dtype in FLOATS:
        return random.normal(size=shape).astype(kind)
    return random.integers(0, 2 if dtype == "bool" else 4, size=shape).astype(kind)
