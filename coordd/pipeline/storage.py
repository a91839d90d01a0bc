"""How the values of a tensor lie in a frame: as they are, in sixteen bits, or in eight with a scale for each block.

A frame says for each tensor which it is, so whoever reads it needs no setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coordd.dtypes import dtype_of

__all__ = ["FORMS", "PLAIN", "Form", "Stored", "laid", "plain"]

Array = np.ndarray

SMALL = 256
"""Tensors of fewer values travel as they are: their messages are short anyway, and so is what they save."""

_BLOCK = 256  # values that share a scale of four bytes
_AT_ONCE = 256  # blocks whose values stay in the processor's cache meanwhile
_LARGEST = 127
_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Stored:
    """A tensor that is about to be stored: how many bytes it will take, and what writes them."""

    nbytes: int
    write: Callable[[Array], None]


class Form(Protocol):
    """A way to store a tensor's values in bytes."""

    def stored(self, array: Array) -> Stored | None:
        """Prepares an array, of any strides, for storing; None if this form would not do it justice."""

    def read(self, stored: Array, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        """Returns an array of stored bytes; a view of them if it can."""

    def nbytes(self, dtype: np.dtype, count: int) -> int:
        """Says how many bytes so many values take."""


def laid(array: Array) -> tuple[Array, tuple[int, ...]]:
    """Views an array with its axes in the order in which they lie in memory, and says what transposes it back."""
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    return array.transpose(order), tuple(order.index(axis) for axis in range(array.ndim))


def plain(array: Array) -> Stored:
    """Prepares an array for storing as it is."""
    return Stored(array.nbytes, lambda out: np.copyto(out.view(array.dtype).reshape(array.shape), array))


class _Plain:
    """Values as they are."""

    def stored(self, array: Array) -> Stored:
        return plain(array)

    def read(self, stored: Array, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        return stored.view(dtype).reshape(shape)

    def nbytes(self, dtype: np.dtype, count: int) -> int:
        return dtype.itemsize * count


class _Brain:
    """bfloat16 in place of fp32 and fp64: their range, eight bits of precision."""

    _wide = frozenset({"float32", "float64"})

    def stored(self, array: Array) -> Stored | None:
        if array.dtype.name not in self._wide or array.size < SMALL:
            return None

        def write(out: Array) -> None:
            with np.errstate(over="ignore"):  # what rounds to more than the largest becomes infinite, as in PyTorch
                np.copyto(out.view(dtype_of("bfloat16")).reshape(array.shape), array, casting="unsafe")

        return Stored(2 * array.size, write)

    def read(self, stored: Array, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        values: Array = stored.view(dtype_of("bfloat16")).reshape(shape).astype(dtype)
        return values

    def nbytes(self, dtype: np.dtype, count: int) -> int:  # noqa: ARG002 - the protocol's
        return 2 * count


class _Eight:
    """Integers that are multiples of their block's scale, the largest value of the block divided by 127."""

    _floating = frozenset({"bfloat16", "float16", "float32", "float64"})

    def stored(self, array: Array) -> Stored | None:
        if array.dtype.name not in self._floating or array.size < SMALL:
            return None
        blocks = _blocks(array)
        with np.errstate(over="ignore"):  # what is too large for fp32 is infinite, and seen to below
            scales = (np.maximum(blocks.max(1), -blocks.min(1)) / _LARGEST).astype(np.float32)
        if not np.isfinite(scales).all():
            return None  # no block has a scale for what is infinite, or no number
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
    """Returns an array's values in rows of a block each, the last one filled up with zeros."""
    flat = array.reshape(-1)
    if flat.dtype.itemsize < 4:
        flat = flat.astype(np.float32)
    padding = -len(flat) % _BLOCK
    return (np.pad(flat, (0, padding)) if padding else flat).reshape(-1, _BLOCK)


PLAIN = "plain"

FORMS: dict[str, Form] = {PLAIN: _Plain(), "bf16": _Brain(), "int8": _Eight()}
"""The forms under the names by which a frame, and a user's setting, call them."""
