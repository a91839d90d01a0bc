"""What one process computes, to compare with: every type, every reduction, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import ml_dtypes
import numpy as np

from coordd.ops.messages import ReduceOp

__all__ = ["BITS", "COMBINE", "KINDS", "ORDERED", "expected", "pieces", "same_bits", "values"]

COMBINE = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
ANY, ORDERED, BITS = list(COMBINE), [ReduceOp.MIN, ReduceOp.MAX], [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
KINDS = [
    *((np.dtype(name), ANY) for name in ("float16", "float32", "float64", ml_dtypes.bfloat16)),
    *((np.dtype(name), ANY) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")),
    *((np.dtype(name), [ReduceOp.SUM, ReduceOp.AVERAGE]) for name in ("complex64", "complex128")),
    (np.dtype(bool), BITS),
]


def values(dtype: np.dtype, size: int, seed: int) -> np.ndarray:
    """Numbers whose sum depends on the order of addition, where the type allows it."""
    source = np.random.default_rng(seed)
    if dtype.kind == "b":
        return source.integers(0, 2, size).astype(bool)
    if dtype.kind in "iu":
        return source.integers(-3 if dtype.kind == "i" else 0, 4, size).astype(dtype)
    numbers = source.normal(size=size) * 10.0 ** source.integers(-2, 3, size)
    if dtype.kind == "c":
        numbers = numbers + 1j * source.normal(size=size)
    return numbers.astype(dtype)


def pieces(lengths: Sequence[int], seed: int) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """What each rank has to give, and by rank the blocks into which it gets what all have; its own is there already."""
    given = [values(np.dtype(np.float16), length, seed + rank) for rank, length in enumerate(lengths)]
    blocks = [
        [piece.copy() if rank == me else np.zeros_like(piece) for rank, piece in enumerate(given)]
        for me in range(len(given))
    ]
    return given, blocks


def expected(inputs: Sequence[np.ndarray], op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> np.ndarray:
    """What one process computes: ((x0 + x1) + x2) …, sixteen-bit floats in fp32, factors of integers in fp64."""
    dtype = inputs[0].dtype
    if dtype.kind in "iu":
        return _expected_whole(inputs, op, prescale, postscale)
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    scaled = [(x.astype(wide) * wide.type(prescale)).astype(dtype) if prescale != 1 else x for x in inputs]
    scaled = [x.astype(wide) for x in scaled]
    total = reduce(COMBINE[op], scaled)
    if op is ReduceOp.AVERAGE:
        total = total / scaled[0].dtype.type(len(inputs))
    if postscale != 1:
        total = total * scaled[0].dtype.type(postscale)
    return total.astype(dtype)


def _expected_whole(inputs: Sequence[np.ndarray], op: ReduceOp, prescale: float, postscale: float) -> np.ndarray:
    """What Horovod computes of integers: each factor, and the division of an average, is followed by a truncation."""
    dtype = inputs[0].dtype
    scaled = [np.trunc(x * prescale).astype(dtype) if prescale != 1 else x for x in inputs]
    total = reduce(COMBINE[op], scaled)
    count = len(inputs) if op is ReduceOp.AVERAGE else 1
    return np.array([int(x * postscale / count) for x in total.tolist()], dtype)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()
