"""What one process would compute, in plain NumPy: every rank knows every rank's arrays, and so the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coordd import api
from coordd.ops.dtypes import dtype_of
from coordd.ops.messages import ReduceOp

__all__ = ["Expected", "allgather", "allreduce", "alltoall", "broadcast", "close", "data", "gradients", "reducescatter"]

Arrays = Sequence[np.ndarray]
_EXACT = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6, "complex64": 1e-6}


class Expected(NamedTuple):
    """What a rank gets of an operation: the result, and the gradient of its array."""

    value: np.ndarray
    gradient: np.ndarray


def data(dtype: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """Makes an array of small numbers; other seeds, other numbers."""
    random = np.random.default_rng(seed)
    kind = dtype_of(dtype)
    if kind.kind in "iub":
        return random.integers(0, 2 if dtype == "bool" else 4, size=shape).astype(kind)
    imaginary = 1j * random.normal(size=shape) if kind.kind == "c" else 0
    return (random.normal(size=shape) + imaginary).astype(kind)


def close(found: np.ndarray, expected: np.ndarray, *, slack: float = 1.0) -> None:
    """Compares types, shapes and values, these as exactly as the type allows, times ``slack``."""
    assert found.dtype.name == expected.dtype.name
    assert found.shape == expected.shape
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    exact = slack * _EXACT.get(expected.dtype.name, 1e-12)
    np.testing.assert_allclose(found.astype(wide), expected.astype(wide), rtol=exact, atol=exact)


def allreduce(arrays: Arrays, upstreams: Arrays, op: ReduceOp) -> Expected:
    """A reduction's gradient is the same reduction of the gradients."""
    return Expected(_reduced(arrays, op), _reduced(upstreams, op))


def allgather(arrays: Arrays, upstreams: Arrays) -> Expected:
    """This rank's rows of the mean of all gradients."""
    start = sum(map(len, arrays[: api.rank()]))
    mean = _reduced(upstreams, ReduceOp.AVERAGE)
    return Expected(np.concatenate(arrays), mean[start : start + len(arrays[api.rank()])])


def alltoall(arrays: Arrays, upstreams: Arrays) -> Expected:
    """The gradients go back to where the rows came from."""
    parts = [np.split(array, len(arrays)) for array in arrays]
    ends = np.cumsum([len(each[0]) for each in parts])[:-1]  # all targets get as much of a rank
    return Expected(
        np.concatenate([each[api.rank()] for each in parts]),
        np.concatenate([np.split(upstream, ends)[api.rank()] for upstream in upstreams]),
    )


def broadcast(arrays: Arrays, upstreams: Arrays, root: int) -> Expected:
    """The mean of all gradients belongs to the root."""
    mean = _reduced(upstreams, ReduceOp.AVERAGE)
    return Expected(arrays[root], mean if api.rank() == root else np.zeros_like(mean))


def reducescatter(arrays: Arrays, upstreams: Arrays, op: ReduceOp) -> Expected:
    """The gradients of all rows, as Horovod has them: those of a sum times the number of ranks."""
    rows = np.array_split(_reduced(arrays, op), len(arrays))[api.rank()]
    return Expected(rows, np.concatenate(upstreams) * (len(arrays) if op is ReduceOp.SUM else 1))


def gradients(weights: Arrays, x: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
    """Those of the mean squared error of ``tanh(x @ hidden) @ out``."""
    hidden, out = weights
    inner = np.tanh(x @ hidden)
    upstream = 2 * (inner @ out - wanted) / wanted.size
    return [x.T @ (upstream @ out.T * (1 - inner**2)), inner.T @ upstream]


def _reduced(arrays: Arrays, op: ReduceOp) -> np.ndarray:
    """Reduces in the widest type of a kind, and rounds once."""
    dtype = arrays[0].dtype
    wide = {"b": np.bool_, "u": np.uint64, "i": np.int64, "c": np.complex128}.get(dtype.kind, np.float64)
    combine = {ReduceOp.MAX: np.maximum, ReduceOp.SUM: np.add, ReduceOp.AVERAGE: np.add}[op]
    found = combine.reduce([array.astype(wide) for array in arrays])
    return (found / len(arrays) if op is ReduceOp.AVERAGE else found).astype(dtype)
