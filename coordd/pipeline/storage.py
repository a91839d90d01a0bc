"""Storage forms of a tensor's values in a frame: unchanged, in sixteen bits, or in eight with a scale for each block.

A frame records the form of each tensor, so the receiver needs no setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coordd.ops.dtypes import dtype_of

__all__ = ["FORMS", "PLAIN", "Form", "Stored", "laid", "plain"]

Array = np.ndarray

SMALL = 256
"""Tensors with fewer values are sent unchanged: their messages are short, and little would be saved."""

_BLOCK = 256  # values that share a scale of four bytes
_AT_ONCE = 256  # blocks processed at a time, so that their values stay in the processor's cache
_LARGEST = 127
_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Stored:
    """A tensor prepared for storing: its size in bytes, and the function that writes it."""

    nbytes: int
    write: Callable[[Array], None]


class Form(Protocol):
    """A form in which a tensor's values are stored as bytes."""

    def stored(self, array: Array) -> Stored | None:
        """Prepares an array, of any strides, for storing; None if this form does not suit it."""

    def read(self, stored: Array, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        """Returns an array from stored bytes; a view of them if possible."""

    def nbytes(self, dtype: np.dtype, count: int) -> int:
        """Returns the bytes that ``count`` values take."""


def laid(array: Array) -> tuple[Array, tuple[int, ...]]:
    """Returns a view of an array with its axes in memory order, and the axes that transpose it back."""
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    return array.transpose(order), tuple(order.index(axis) for axis in range(array.ndim))


def plain(array: Array) -> Stored:
    """Prepares an array for storing unchanged."""
    return Stored(array.nbytes, lambda out: np.copyto(out.view(array.dtype).reshape(array.shape), array))


class _Plain:
    """Values unchanged."""

    def stored(self, array: Array) -> Stored:
        return plain(array)

    def read(self, stored: Array, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        return stored.view(dtype).reshape(shape)

    def nbytes(self, dtype: np.dtype, count: int) -> int:
        return dtype.itemsize * count


class _Brain:
    """bfloat16 in place of fp32 and fp64: the range of fp32, eight bits of precision."""

    _wide = frozenset({"float32", "float64"})

    def stored(self, array: Array) -> Stored | None:
        if array.dtype.name not in self._wide or array.size < SMALL:
            return None

        def write(out: Array) -> None:
            with np.errstate(over="ignore"):  # values that round beyond the largest become infinite, as in PyTorch
                np.copyto(out.view(dtype_of("bfloat16")).reshape(array.shape), array, casting="unsafe")

        return Stored(2 * array.size, write)

    def read(self, stored: Array, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        values: Array = stored.view(dtype_of("bfloat16")).reshape(shape).astype(dtype)
        return values

    def nbytes(self, dtype: np.dtype, count: int) -> int:  # noqa: ARG002 - the protocol's
        return 2 * count


class _Eight:
    """Integers that are multiples of their block's scale, the largest magnitude of the block divided by 127."""

    _floating = frozenset({"bfloat16", "float16", "float32", "float64"})

    def stored(self, array: Array) -> Stored | None:
        if array.dtype.name not in self._floating or array.size < SMALL:
            return None
        blocks = _blocks(array)
        with np.errstate(over="ignore"):  # values too large for fp32 become infinite, and are handled below
            scales = (np.maximum(blocks.max(1), -blocks.min(1)) / _LARGEST).astype(np.float32)
        if not np.isfinite(scales).all():
            return None  # no scale exists for a block with infinities or NaN
        np.maximum(scales, _TINY, out=scales)

        def write(out: Array) -> None:
            out[: scales.nbytes].view(np.float32)[:] = scales
            numbers = out[scales.nbytes :].view(np.int8)
            for start in range(0, len(blocks), _AT_ONCE):
                rows = slice(start, start + _AT_ONCE)
                steps = blocks[rows] / scales[rows, None]
                part = numbers[start * _BLOCK :][: steps.size]
                part[:] = np.rint(steps, out=steps).reshape(-1)[: len(part)]

        return Stored(self.nbytes(array.dtype, array.size), write)

    def read(self, stored: Array, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        count = int(np.prod(shape))
        scales = stored[: len(stored) - count].view(np.float32)
        values = stored[scales.nbytes :].view(np.int8).astype(np.promote_types(dtype, np.float32))
        whole = count - count % _BLOCK
        blocks = values[:whole].reshape(-1, _BLOCK)
        blocks *= scales[: len(blocks), None]
        values[whole:] *= scales[-1]
        return values.reshape(shape).astype(dtype, copy=False)

    def nbytes(self, dtype: np.dtype, count: int) -> int:  # noqa: ARG002 - the protocol's
        return count + 4 * -(-count // _BLOCK)


def _blocks(array: Array) -> Array:
    """Returns an array's values in rows of one block each, the last one padded with zeros."""
    flat = array.reshape(-1)
    if flat.dtype.itemsize < 4:
        flat = flat.astype(np.float32)
    padding = -len(flat) % _BLOCK
    return (np.pad(flat, (0, padding)) if padding else flat).reshape(-1, _BLOCK)


PLAIN = "plain"

FORMS: dict[str, Form] = {PLAIN: _Plain(), "bf16": _Brain(), "int8": _Eight()}
"""The forms, by the names that frames and the user's settings use."""
