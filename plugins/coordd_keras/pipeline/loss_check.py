"""Checks that a loss can be computed microbatch by microbatch, before its gradient is used.

A pipeline adds up the losses of microbatches, each weighted by its rows or by ``weight=``. The sum equals the loss of
the batch only if the loss is such a mean over rows: then the loss of some rows equals the weighted mean of the losses
of two parts of them. The last stage compares these in some runs (`coordd.pipeline.loss_check`), and each stage does the
same for the losses that its layers add, which are weighted by rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from coordd.errors import ArgumentError, brief
from coordd.pipeline import loss_check
from coordd.pipeline.batch import Batch
from coordd.pipeline.loss_check import UnclearError

__all__ = ["AddedLosses", "Judge", "LayerLossCheck", "LossCheck"]

Judge = Callable[[Sequence[Any], Sequence[Any], Any], float]
"""Computes the loss of a list of outputs with their masks and targets; changes no metric."""

AddedLosses = Callable[[Sequence[Any], Sequence[Any], bool], list[tuple[str, float]]]
"""Computes the losses that a stage's layers add, each with the layer's name, from inputs, masks and training mode.

Regularizers of weights, which do not depend on rows, are left out.
"""

_NOISE, _NOISE_16 = 1e-3, 5e-2
"""Relative rounding tolerance when losses are compared; the second for outputs with 16-bit dtypes."""


class _Sample(NamedTuple):
    """Some rows of a batch: outputs and masks as arrays, targets, and their weight."""

    outputs: list[np.ndarray]
    masks: list[np.ndarray | None]
    targets: Any
    amount: float


class LossCheck(loss_check.LossCheck):
    """Compares the loss of some rows with the losses of two parts of them."""

    _first: _Sample | None

    def __init__(self, judge: Judge, *, weighted: bool, declared: bool = False) -> None:
        """Keeps the settings.

        Args:
            judge: computes the loss.
            weighted: whether `weight=` gives the weight of microbatches.
            declared: whether the user declares the loss to be a mean; if not, a loss that cannot be checked causes a
                warning.
        """
        super().__init__(weighted=weighted, declared=declared)
        self._judge = judge

    def look(self, microbatch: int, outputs: Sequence[Any], masks: Sequence[Any], batch: Batch) -> None:
        """Checks the loss with the outputs and masks of a microbatch.

        Raises:
            ArgumentError: the loss is not such a mean; the text says what to do.
        """
        if not self._active or batch.weight(microbatch) in {0.0, 1.0}:
            return
        self._attempt(lambda: self._checked(microbatch, outputs, masks, batch))
        self.warn()

    def _checked(self, microbatch: int, outputs: Sequence[Any], masks: Sequence[Any], batch: Batch) -> bool:
        """Returns whether the check was conclusive."""
        parts = self._parts(microbatch, outputs, masks, batch)
        return len(parts) > 1 and self._compared(parts)

    def _parts(self, microbatch: int, outputs: Sequence[Any], masks: Sequence[Any], batch: Batch) -> list[_Sample]:
        """Returns two samples: halves of this microbatch, or a first single row and this one; one at the first row."""
        part = batch.parts[microbatch]
        count = part.stop - part.start
        found = [keras.ops.convert_to_numpy(keras.ops.stop_gradient(output)) for output in outputs]
        told = [None if mask is None else keras.ops.convert_to_numpy(mask) for mask in masks]
        if any(
            not array.ndim or len(array) != count for array in [*found, *(mask for mask in told if mask is not None)]
        ):
            raise UnclearError("an output of the model has no row for each row of the inputs")

        def sample(rows: slice) -> _Sample:
            chosen = slice(part.start + rows.start, part.start + rows.stop)
            own = [None if mask is None else mask[rows] for mask in told]
            return _Sample([array[rows] for array in found], own, batch.targets_of(chosen), batch.amount(chosen))

        if count > 1:
            return [sample(slice(0, count // 2)), sample(slice(count // 2, count))]
        before, self._first = self._first, self._first or sample(slice(0, 1))
        return [self._first] if before is None else [before, sample(slice(0, 1))]

    def _compared(self, parts: Sequence[_Sample]) -> bool:
        """Returns whether the check was conclusive."""
        whole = self._found(_joined(*parts))
        losses = [self._found(part) if part.amount else 0.0 for part in parts]
        amount = sum(part.amount for part in parts)
        if not amount or not all(map(math.isfinite, (whole, *losses))):
            return False
        noise = _NOISE_16 if any(array.itemsize < 4 for array in parts[0].outputs) else _NOISE
        expected = sum(loss * part.amount / amount for loss, part in zip(losses, parts, strict=True))
        scale = max(abs(whole), *map(abs, losses))
        if abs(whole - expected) <= noise * scale:
            return scale > 0 and all(part.amount for part in parts)
        if abs(self._found(_joined(*parts)) - whole) > noise * scale:
            raise UnclearError("it does not give the same each time it is called")
        raise ArgumentError(self._told(summed=abs(whole - sum(losses)) <= noise * scale))

    def _found(self, sample: _Sample) -> float:
        """Returns the loss of some rows.

        Raises:
            UnclearError: the loss raises an error.
        """
        try:
            return self._judge(sample.outputs, sample.masks, sample.targets)
        except Exception as error:
            raise UnclearError(f"with {len(sample.outputs[0])} rows it raises {brief(error)}") from error

    def _told(self, *, summed: bool) -> str:
        """Returns the error message: what is wrong with the loss, and what to do."""
        if summed:
            return (
                "loss= adds rows up, and a pipeline takes it for their mean, so gradients would be divided by the "
                "number of microbatches: let it return the mean over rows, or one value for each row"
            )
        if self._weighted:
            return (
                "loss= is no mean by weight=, which must return the number of what the loss of a microbatch is the "
                "mean of, such as (y != -1).sum()"
            )
        return (
            "loss= is no mean over rows: rows do not count equally, as with masks and values that are left out "
            "(ignore_class), or mix, as in contrastive losses, so the mean of the losses of microbatches is not the "
            "loss of the batch: give weight=, which returns the number of what the loss of a microbatch is the mean "
            "of, such as lambda x, y: (y != -1).sum(), or set microbatches=1 without replicas"
        )


class LayerLossCheck(loss_check.LossCheck):
    """Compares the losses that layers add for a microbatch with those for its halves."""

    def __init__(self, added: AddedLosses, *, half: bool = False, declared: bool = False) -> None:
        """Keeps the settings.

        Args:
            added: computes the losses; changes no variable.
            half: whether layers compute with 16-bit dtypes.
            declared: whether the user declares losses to be means; if not, one that is neither mean nor sum causes a
                warning.
        """
        super().__init__(weighted=False, declared=declared)
        self._added = added
        self._noise = _NOISE_16 if half else _NOISE

    def look(self, values: Sequence[Any], masks: Sequence[Any]) -> None:
        """Checks the losses of layers with a stage's inputs for a microbatch; only the first of a run is checked.

        Raises:
            ArgumentError: a layer's loss is a sum over rows; the text says what to do.
        """
        if self._active:
            self._attempt(lambda: self._checked(values, masks))
            self._active = False
            self.warn()

    def _checked(self, values: Sequence[Any], masks: Sequence[Any]) -> bool:
        """Returns whether the check was conclusive."""
        if not self._losses((values, masks)):
            return True
        given = [keras.ops.convert_to_numpy(value) for value in values]
        mask_arrays = [None if mask is None else keras.ops.convert_to_numpy(mask) for mask in masks]
        row_counts = {
            len(array) if array.ndim else 0 for array in [*given, *(mask for mask in mask_arrays if mask is not None)]
        }
        if len(row_counts) != 1:
            raise UnclearError("layers add losses to it, and inputs of their stage have different numbers of rows")
        rows = row_counts.pop()
        if rows < 2:
            return False
        parts = (slice(0, rows), slice(0, rows // 2), slice(rows // 2, rows))
        samples = [
            ([array[part] for array in given], [None if mask is None else mask[part] for mask in mask_arrays])
            for part in parts
        ]
        means = [_is_mean(*losses, rows=rows, noise=self._noise) for losses in self._losses(*samples)]
        return all(means)

    def _losses(self, *samples: tuple[Sequence[Any], Sequence[Any]]) -> list[list[tuple[str, float]]]:
        """Computes each loss for each sample, if possible outside of training, where nothing is random.

        Raises:
            UnclearError: the number of losses depends on the rows, or a layer raises an error.
        """
        try:
            trained, evaluated = ([self._added(*sample, training) for sample in samples] for training in (True, False))
        except Exception as error:
            raise UnclearError(
                f"layers add losses to it, and one raises {brief(error)} with fewer rows or outside of training"
            ) from error
        if len({len(losses) for losses in trained}) > 1:
            raise UnclearError("layers add more or fewer losses to it for fewer rows")
        in_training = [list(losses) for losses in zip(*trained, strict=True)]
        if any(len(losses) != len(in_training) for losses in evaluated):
            return in_training
        outside = [list(losses) for losses in zip(*evaluated, strict=True)]
        return [one if any(loss for _, loss in one) else other for one, other in zip(outside, in_training, strict=True)]


def _is_mean(
    whole: tuple[str, float], first: tuple[str, float], second: tuple[str, float], *, rows: int, noise: float
) -> bool:
    """Returns whether a layer's loss for some rows is known to be the mean of those for their halves.

    Raises:
        ArgumentError: it is their sum.
        UnclearError: it is neither.
    """
    name, loss = whole
    half, rest = first[1], second[1]
    if not all(map(math.isfinite, (loss, half, rest))):
        return False
    scale = max(abs(loss), abs(half), abs(rest))
    if abs(loss - (half * (rows // 2) + rest * (rows - rows // 2)) / rows) <= noise * scale:
        return scale > 0
    if abs(loss - half - rest) <= noise * scale:
        if min(abs(half), abs(rest)) <= 2 * noise * scale:
            return False  # a mean over some rows, all in one half, equals the sum
        raise ArgumentError(
            f"the layer {name!r} adds a loss that sums over rows, and a pipeline takes it for their mean, so its "
            "gradients would be divided by the number of microbatches: let it be the mean over rows, or set "
            "microbatches=1 without replicas"
        )
    raise UnclearError(
        f"the layer {name!r} adds a loss to it that is no mean over rows, or random, so each microbatch adds its own"
    )


def _joined(first: _Sample, second: _Sample) -> _Sample:
    """Concatenates the rows of two samples."""
    targets = keras.tree.map_structure(
        lambda one, other: np.concatenate([one, other]) if one is not None and np.ndim(one) else one,
        first.targets,
        second.targets,
    )
    return _Sample(
        [np.concatenate(pair) for pair in zip(first.outputs, second.outputs, strict=True)],
        [
            None if one is None or other is None else np.concatenate([one, other])
            for one, other in zip(first.masks, second.masks, strict=True)
        ],
        targets,
        first.amount + second.amount,
    )
