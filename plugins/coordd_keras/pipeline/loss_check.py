"""Checks that a loss can be computed microbatch by microbatch, before its gradient is used.

A pipeline adds up the losses of microbatches, each weighted by its rows or by ``weight=``. The sum equals the loss of
the batch only if the loss is such a mean over rows: then the loss of some rows equals the weighted mean of the losses
of two parts of them. The last stage compares these in some runs (`coordd.pipeline.loss_check`), and each stage does the
same for the losses that its layers add, which are weighted by rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import keras
import numpy as np

from coordd.errors import ArgumentError, brief
from coordd.pipeline import loss_check
from coordd.pipeline.batch import Batch
from coordd.pipeline.loss_check import UnclearError

__all__ = ["Added", "AddedLosses", "Inputs", "Judge", "LayerLossCheck", "LossCheck"]

Judge = Callable[[Sequence[Any], Sequence[Any], Any], float]
"""Computes the loss of a list of outputs with their masks and targets; changes no metric."""

Inputs = tuple[Sequence[Any], Sequence[Any]]
"""The inputs of a stage for some rows, and their masks."""


class Added(NamedTuple):
    """The losses that a stage's layers add in some calls, without those of regularizers of weights.

    Attributes:
        losses: for each call, the losses with the names of their layers.
        changed: whether a call has changed statistics of layers, such as those of batch normalisation.
    """

    losses: list[list[tuple[str, float]]]
    changed: bool


AddedLosses = Callable[[Sequence[Inputs], bool], Added]
"""Calls a stage's layers with each of the inputs, in training mode or not; restores what the calls have changed."""

_NOISE, _NOISE_16 = 1e-3, 5e-2
"""Relative rounding tolerance when losses are compared; the second for outputs with 16-bit dtypes."""
_REPEATED = 1e-6
"""Relative difference of two losses of the same rows that are not random."""


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


class Reduction(Enum):
    """How a loss combines rows, judged by its values for some rows and for two parts of them."""

    MEAN = "mean"
    SUM = "sum"
    OTHER = "other"
    UNKNOWN = "unknown"
    """It is zero, or not finite."""


class _LayerLoss(NamedTuple):
    """A loss that a layer adds.

    Attributes:
        layer: the layer's name.
        reduction: in the mode that is checked.
        repeatable: whether it is the same when the layer is called again.
        outside_training: its reduction outside of training, where layers usually draw no random numbers; UNKNOWN if
            that was not compared.
    """

    layer: str
    reduction: Reduction
    repeatable: bool = True
    outside_training: Reduction = Reduction.UNKNOWN


class LayerLossCheck(loss_check.LossCheck):
    """Compares the losses that layers add for some rows with those for two parts of them."""

    _first: Inputs | None

    def __init__(self, added: AddedLosses, *, training: bool, half: bool = False, declared: bool = False) -> None:
        """Keeps the settings.

        Args:
            added: computes the losses.
            training: whether losses are checked in training mode.
            half: whether layers compute with 16-bit dtypes.
            declared: whether the user declares losses to be means; if not, one that is neither mean nor sum causes a
                warning.
        """
        super().__init__(weighted=False, declared=declared)
        self._added = added
        self._training = training
        self._noise = _NOISE_16 if half else _NOISE

    def look(self, values: Sequence[Any], masks: Sequence[Any]) -> None:
        """Checks the losses of layers with a stage's inputs for a microbatch; once in a run.

        Raises:
            ArgumentError: a layer's loss is a sum over rows; the text says what to do.
        """
        if self._active:
            self._active = False
            self._attempt(lambda: self._checked(values, masks))
            self.warn()

    def _checked(self, values: Sequence[Any], masks: Sequence[Any]) -> bool:
        """Returns whether the check was conclusive."""
        if not self._losses([(values, masks)], training=self._training).losses[0]:
            return True
        arrays = [keras.ops.convert_to_numpy(value) for value in values]
        mask_arrays = [None if mask is None else keras.ops.convert_to_numpy(mask) for mask in masks]
        row_counts = {
            len(array) if array.ndim else 0 for array in [*arrays, *(mask for mask in mask_arrays if mask is not None)]
        }
        if len(row_counts) != 1:
            raise UnclearError("layers add losses to it, and inputs of their stage have different numbers of rows")
        given: Inputs = arrays, mask_arrays
        rows = row_counts.pop()
        if rows == 1:
            if self._first is None:
                self._first, self._active = given, True  # the next microbatch has the other row
                return False
            given, rows = _stacked(self._first, given), 2
            self._first = None
        found = self._compared([given, _sliced(given, 0, rows // 2), _sliced(given, rows // 2, rows)], rows)
        for loss in found:
            _check(loss)
        return all(loss.reduction is not Reduction.UNKNOWN for loss in found)

    def _compared(self, samples: Sequence[Inputs], rows: int) -> list[_LayerLoss]:
        """Compares each loss for some rows with those for two parts of them."""
        if not self._training:
            return self._reduced(self._losses(samples, training=False).losses, rows)
        # Called with the same rows once more, layers draw other random numbers.
        found = self._losses([*samples, samples[0]], training=True)
        *trained, repeated = found.losses
        losses = self._reduced(trained, rows)
        outside_training = self._reduced(self._losses(samples, training=False).losses, rows)
        if [loss.layer for loss in outside_training] != [loss.layer for loss in losses]:
            outside_training = [_LayerLoss("", Reduction.UNKNOWN)] * len(losses)
        return [
            loss._replace(
                repeatable=not found.changed and abs(again - once) <= _REPEATED * max(abs(again), abs(once)),
                outside_training=other.reduction,
            )
            for loss, other, (_, once), (_, again) in zip(losses, outside_training, trained[0], repeated, strict=True)
        ]

    def _reduced(self, losses: Sequence[Sequence[tuple[str, float]]], rows: int) -> list[_LayerLoss]:
        """Judges each loss by its values for some rows and for two parts of them."""
        return [
            _LayerLoss(whole[0], _reduction(whole[1], first[1], second[1], rows=rows, noise=self._noise))
            for whole, first, second in zip(*losses, strict=True)
        ]

    def _losses(self, samples: Sequence[Inputs], *, training: bool) -> Added:
        """Computes the losses of layers.

        Raises:
            UnclearError: the number of losses depends on the rows, or a layer raises an error.
        """
        try:
            found = self._added(samples, training)
        except Exception as error:
            raise UnclearError(
                f"layers add losses to it, and one raises {brief(error)} with fewer rows or outside of training"
            ) from error
        if len({len(losses) for losses in found.losses}) > 1:
            raise UnclearError("layers add more or fewer losses to it for fewer rows")
        return found


def _reduction(whole: float, first: float, second: float, *, rows: int, noise: float) -> Reduction:
    """Returns how a loss combines rows, given its values for all and for the two halves."""
    scale = max(abs(whole), abs(first), abs(second))
    if not math.isfinite(scale) or scale == 0:
        return Reduction.UNKNOWN
    if abs(whole - (first * (rows // 2) + second * (rows - rows // 2)) / rows) <= noise * scale:
        return Reduction.MEAN
    if abs(whole - first - second) <= noise * scale and min(abs(first), abs(second)) > 2 * noise * scale:
        return Reduction.SUM
    return Reduction.OTHER  # also a mean over some rows, all in one half, which equals the sum


def _check(loss: _LayerLoss) -> None:
    """Checks that a loss is a mean over rows, as far as known.

    Where it is random in training, or statistics of rows, as those of batch normalisation, enter it, it is judged as
    outside of training.

    Raises:
        ArgumentError: it is a sum.
        UnclearError: it is neither.
    """
    reduction = loss.reduction
    if reduction in {Reduction.SUM, Reduction.OTHER} and not loss.repeatable:
        reduction = Reduction.OTHER if loss.outside_training is Reduction.UNKNOWN else loss.outside_training
    if reduction is Reduction.SUM:
        raise ArgumentError(
            f"the layer {loss.layer!r} adds a loss that sums over rows, and a pipeline takes it for their mean, so its "
            "gradients would be divided by the number of microbatches: let it be the mean over rows, or set "
            "microbatches=1 without replicas"
        )
    if reduction is Reduction.OTHER:
        raise UnclearError(
            f"the layer {loss.layer!r} adds a loss to it that is no mean over rows, or random, so each microbatch adds "
            "its own"
        )


def _sliced(given: Inputs, start: int, stop: int) -> Inputs:
    """Returns some rows of inputs and masks."""
    values, masks = given
    return [value[start:stop] for value in values], [None if mask is None else mask[start:stop] for mask in masks]


def _stacked(first: Inputs, second: Inputs) -> Inputs:
    """Concatenates the rows of inputs and masks.

    Raises:
        UnclearError: their other dimensions differ.
    """
    try:
        values, masks = (
            [
                None if one is None or other is None else np.concatenate([one, other])
                for one, other in zip(*pair, strict=True)
            ]
            for pair in zip(first, second, strict=True)
        )
    except ValueError as error:
        raise UnclearError("layers add losses to it, and microbatches of one row have different shapes") from error
    return values, masks


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
