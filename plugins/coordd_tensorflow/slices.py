"""Reduces `tf.IndexedSlices` by concatenating the slices of all ranks; an index may occur several times.

Values and indices are gathered by two operations, one after the other, and are checked before the first. That one has
the name, or the number, that a dense reduction would have, so that ranks get an error if only some of them have slices.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import tensorflow as tf

from coordd import api
from coordd.daemon.autograd_rules import Allgather, Source
from coordd.daemon.operations import Operations
from coordd.daemon.reject_on_all_ranks import SecondOperation, refusable
from coordd.errors import ArgumentError, NonFiniteError
from coordd.ops.arguments import check_reducible
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd_tensorflow.differentiable import differentiable
from coordd_tensorflow.graph import call
from coordd_tensorflow.tensors import check_dense

__all__ = ["checked_finite", "checked_slices", "join_slices"]

log = logging.getLogger("coordd")


def checked_slices(slices: tf.IndexedSlices, op: ReduceOp, factors: tuple[Any, Any]) -> tf.IndexedSlices:
    """Rejects arguments that slices do not support, before any operation is submitted.

    Raises:
        ArgumentError: the reduction is neither sum nor average, or a factor is not 1.
    """
    if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
        text = f"{op.name.capitalize()} of tf.IndexedSlices is not supported: use Sum or Average, or convert_to_tensor"
        raise ArgumentError(text)
    if factors != (1.0, 1.0):
        text = "prescale and postscale factors are not supported with tf.IndexedSlices: scale the values"
        raise ArgumentError(text)
    return tf.IndexedSlices(check_dense(slices.values), check_dense(slices.indices), slices.dense_shape)


def join_slices(slices: tf.IndexedSlices, name: str | None, op: ReduceOp, process_set: ProcessSet) -> tf.IndexedSlices:
    """Reduces slices by concatenating those of all ranks."""
    joining = _Joining(api.source(), [name], process_set, op=op)
    (values,), kept = differentiable(joining, [slices.values], [slices.indices])
    indices = tf.cast(kept[2:], slices.indices.dtype)
    indices.set_shape([None])  # Keras's optimizers need a known rank in a graph
    members = process_set.count(api.size())
    if op is ReduceOp.AVERAGE and members != 1:
        values = values / tf.cast(members, values.dtype)  # integers become floats, as in Horovod
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def checked_finite(slices: tf.IndexedSlices, name: str, wanted: str) -> tf.IndexedSlices:
    """Warns or raises, equally on all ranks, if joined slices contain values that are not finite.

    Args:
        slices: of all ranks.
        name: of their variable.
        wanted: ``warn`` or ``raise``.
    """

    def look(values: np.ndarray) -> list[np.ndarray]:
        if not np.isfinite(values).all():
            nans, infinities = int(np.isnan(values).sum()), int(np.isinf(values).sum())
            error = NonFiniteError(name, None, nans=nans, infinities=infinities)
            if wanted == "raise":
                raise error
            log.warning("%s", error)
        return [np.array(0, np.int32)]

    with tf.control_dependencies(call(look, [slices.values], [tf.int32])):
        return tf.IndexedSlices(tf.identity(slices.values), slices.indices, slices.dense_shape)


class _Joining(Allgather):
    """Gathers values, which have gradients, and indices; saves this rank's row range and the indices of all ranks."""

    def __init__(self, source: Source, names: list[str | None], process_set: ProcessSet, *, op: ReduceOp) -> None:
        super().__init__(source, names, process_set)
        self._op = op

    def forward(self, *arrays: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Gathers values and indices."""
        values, indices = arrays
        rows, sizes, joined = _gathered(
            self._source(), values, indices, op=self._op, name=self._names[0], process_set=self._process_set
        )
        start = sizes[: self._place()].sum()
        return (rows,), np.concatenate([[start, start + len(values)], joined]).astype(np.int64)

    def backward(self, kept: np.ndarray, *gradients: np.ndarray) -> tuple[np.ndarray, ...]:
        """Averages the gradients of the values and returns this rank's rows."""
        return super().backward(kept[:2, None], *gradients)

    def double_backward(self, kept: np.ndarray, *gradients: np.ndarray) -> tuple[np.ndarray, ...]:
        """Averages the gradients, at this rank's rows of the values of all ranks."""
        return super().double_backward(np.array([*kept[:2], len(kept) - 2])[:, None], *gradients)


@refusable(Kind.ALLREDUCE, announces=True)
def _gathered(
    operations: Operations,
    values: np.ndarray,
    indices: np.ndarray,
    *,
    op: ReduceOp,
    name: str | None,
    process_set: ProcessSet,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gathers values and indices; returns the values, the number of rows of each rank, and the indices.

    Raises:
        ArgumentError: these are not valid slices, or their dtype does not allow the reduction.
    """
    check_reducible(values.dtype, op, scaled=False, truncate=operations.as_horovod)
    if not values.ndim or indices.ndim != 1 or len(values) != len(indices) or indices.dtype.kind not in "iu":
        text = (
            "tf.IndexedSlices have as many indices, integers in one dimension, as values have rows, not indices "
            f"{indices.dtype}{list(indices.shape)} and values {values.dtype}{list(values.shape)}"
        )
        raise ArgumentError(text)
    name = operations.number(Kind.ALLREDUCE, process_set) if name is None else name
    second = f"{name}.indices"
    with SecondOperation(operations, Kind.ALLGATHER, second, process_set) as block:
        block.first = operations.allgather(values, name=name, process_set=process_set, op=op, sized=True, land=_pair)
        rows, sizes = block.first.result()
        handle = operations.allgather(indices, name=second, process_set=process_set, sized=True, land=_pair)
    found, counts = handle.result()
    if len(rows) != len(found):  # a rank has joined between the two
        rows = rows[np.repeat(counts == sizes, sizes)]
    return rows, counts, found


def _pair(rows: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows, sizes
