"""Checks whether a loss can be computed microbatch by microbatch, before its gradient is used.

A pipeline adds up the losses of microbatches: their mean, each weighted by its rows or by ``weight=``, or, with
``loss_reduction="sum"``, their sum. That equals the loss of the batch only if the loss is such a mean or sum over rows.
Let ``a`` and ``b`` be parts of the rows of a batch, and ``p`` the weight of ``a`` in both. Then for all rows of a

    gradient of loss(a and b) = p * gradient of loss(a)

where ``p`` is 1 for a sum. The check measures that factor with detached outputs, so no parameter gets a gradient. It
does not change random number generators, targets or the buffers of the loss.

`coordd.pipeline.loss_check` decides which runs are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError, brief
from coordd.pipeline import loss_check
from coordd.pipeline.batch import Batch
from coordd.pipeline.config import LossReduction
from coordd.pipeline.loss_check import UnclearError
from coordd_torch.pipeline.buffers import borrowed, copies, every
from coordd_torch.pipeline.rng_state import untouched

__all__ = ["LossCheck"]

Dimensions = Callable[[Any], Sequence[int | None] | None]
"""For inputs of the model the row dimension of each leaf of its output, if that is known."""

_NOISE, _NOISE_16 = 5e-3, 5e-2
"""Largest relative rounding difference of gradients, also in TF32; the second value is for 16-bit gradients."""

_EXACT, _EXACT_16 = 1e-5, 1e-2
"""Relative error of the factor that is always accepted; the second value is for 16-bit gradients."""

_CHOICES = "or set PipelineConfig(loss_reduction='microbatch'), which trains the mean of the losses of microbatches"


@dataclass
class _Sample:
    """Some rows of a batch: the leaves of the model's output for them, their targets, and their weight."""

    leaves: list[Any]
    targets: Any
    amount: float
    rows: int


@dataclass
class _Found:
    """Result of the check for one leaf of the output.

    Attributes:
        factors: of each part; None if its gradient is zero, which gives no information.
        rest: relative difference between the gradient of all rows and the gradients of the parts times their factors.
        noise: largest value of `rest` that rounding explains.
        exact: relative error of a factor that is always accepted.
    """

    factors: list[float | None]
    rest: float
    noise: float
    exact: float

    def fits(self, shares: Sequence[float]) -> bool:
        """Returns whether the parts count by these shares, up to rounding."""
        return not self.rest > self.noise and all(
            factor is None or abs(factor - share) <= share * max(self.rest, self.exact)
            for factor, share in zip(self.factors, shares, strict=True)
        )


class LossCheck(loss_check.LossCheck):
    """Compares the loss of some rows with the losses of two parts of them."""

    _hint = (
        "If it is a mean over tokens of which some do not count, give weight=; if it is a sum, set "
        "PipelineConfig(loss_reduction='sum'). Pipeline.verify_parity shows whether gradients are those of the whole "
        "batch; loss_reduction='mean' says that it is a mean, without this warning"
    )
    _first: _Sample | None

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        *,
        reduction: LossReduction | None,
        weighted: bool,
        dimensions: Dimensions,
    ) -> None:
        """Creates the check.

        Args:
            loss: of an output and targets.
            reduction: the declared reduction of the loss; if None, a warning is logged when the loss cannot be checked.
            weighted: whether `weight=` gives the weight of microbatches.
            dimensions: returns the row dimensions of an output; called before a loss is rejected.
        """
        super().__init__(weighted=weighted, wanted=reduction != "microbatch", declared=reduction is not None)
        self._loss = loss
        self._reduction = reduction
        self._dimensions = dimensions

    def look(self, microbatch: int, output: Any, batch: Batch) -> None:
        """Checks the loss with the output of a microbatch.

        Raises:
            ArgumentError: the loss is not such a mean or sum over rows; the message suggests a fix.
        """
        if not (self._active and batch.weight(microbatch)):
            return
        with torch.inference_mode(mode=False), torch.enable_grad():
            self._attempt(lambda: self._checked(microbatch, output, batch))

    def _checked(self, microbatch: int, output: Any, batch: Batch) -> bool:
        """Returns whether the check had a result."""
        leaves, structure = pytree.tree_flatten(output)
        part = batch.parts[microbatch]
        count = part.stop - part.start
        with_rows = [isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count for leaf in leaves]
        try:
            own = _sample(leaves, with_rows, batch, part, slice(0, count))
            first = self._first
            if first is None and count > 1:
                halves = slice(0, count // 2), slice(count // 2, count)
                first, own = (_sample(leaves, with_rows, batch, part, half) for half in halves)
            self._first = self._first or next((each for each in (first, own) if each is not None and each.amount), None)
            first = first or own
            both = _joined(first, own, with_rows)
        except Exception as error:
            raise UnclearError(f"outputs of microbatches cannot be taken apart and joined ({brief(error)})") from error
        return self._compared(both, [first, own], with_rows, structure, batch)

    def _compared(
        self, both: _Sample, parts: Sequence[_Sample], with_rows: Sequence[bool], structure: Any, batch: Batch
    ) -> bool:
        whole, total = self._gradients(both, structure)
        if not (both.amount and math.isfinite(total) and all(_finite(each) for each in whole)):
            return False
        self._refuse_rowless(whole, with_rows)
        apart = [self._gradients(part, structure) if part.amount else ([None] * len(whole), 0.0) for part in parts]
        shares = [1.0 if self._reduction == "sum" else part.amount / both.amount for part in parts]
        measured = [
            _measured(gradient, [(each[place], loss) for each, loss in apart], parts)
            for place, gradient in enumerate(whole)
            if gradient is not None and gradient.any()
        ]
        if wrong := [each for each in measured if not each.fits(shares)]:
            self._confirm(both, whole, structure, batch)
            raise ArgumentError(self._told(wrong[0]))
        return bool(measured) and all(part.amount for part in parts)

    def _gradients(self, sample: _Sample, structure: Any) -> tuple[list[Tensor | None], float]:
        """Returns the gradient of the loss with respect to each leaf of the output, and the loss.

        Raises:
            UnclearError: the loss raises an error, or draws random numbers.
        """
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in sample.leaves]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        for place in places:
            leaves[place].requires_grad_()
        found: list[Tensor | None] = [None] * len(leaves)
        try:
            with self._spared(), untouched() as drawn:
                copied = [
                    leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves
                ]  # the loss may write to them
                given = pytree.tree_unflatten(copied, structure)
                loss = self._loss(given, pytree.tree_map(_copied, sample.targets))
                if loss.requires_grad and places:
                    wanted = [leaves[place] for place in places]
                    gradients = torch.autograd.grad(loss.reshape(()), wanted, allow_unused=True)
                    for place, gradient in zip(places, gradients, strict=True):
                        found[place] = gradient
                random = drawn()
        except Exception as error:
            raise UnclearError(f"with {sample.rows} rows it raises {brief(error)}") from error
        if random:
            raise UnclearError("it draws random numbers")
        return found, float(loss.detach())

    def _spared(self) -> AbstractContextManager[None]:
        """Makes a loss with buffers write to copies of them."""
        return borrowed(copies(every(self._loss))) if isinstance(self._loss, nn.Module) else nullcontext()

    def _refuse_rowless(self, gradients: Sequence[Tensor | None], with_rows: Sequence[bool]) -> None:
        """Raises if the loss depends on an output without rows, such as a loss that the model computes itself."""
        for gradient, has_rows in zip(gradients, with_rows, strict=True):
            if gradient is not None and not has_rows and bool(gradient.any()):
                raise UnclearError(
                    "it depends on a part of the output that has no row for each row of the inputs, such as a loss "
                    "that the model finds by itself"
                )

    def _confirm(self, both: _Sample, whole: Sequence[Tensor | None], structure: Any, batch: Batch) -> None:
        """Repeats the measurement before a loss is rejected.

        Raises:
            UnclearError: the loss is not deterministic, or the rows are not in the first dimension.
        """
        again, _ = self._gradients(both, structure)
        for one, other in zip(whole, again, strict=True):
            if one is not None and (other is None or not torch.allclose(one, other, rtol=_EXACT_16, equal_nan=True)):
                raise UnclearError("it does not give the same each time it is called")
        known = self._dimensions(batch.given) or [0] * len(whole)
        for place, gradient in enumerate(whole):
            if gradient is not None and gradient.any() and len(known) == len(whole) and known[place] != 0:
                raise UnclearError("the output has its rows in another dimension than the first")

    def _told(self, found: _Found) -> str:
        """Explains what is wrong with the loss, and how to fix it."""
        summed = all(factor and abs(factor - 1) <= max(found.rest, found.exact) for factor in found.factors)
        if found.rest > found.noise and not self._weighted:
            return (
                "loss= is no mean over rows: what it takes from one row depends on other rows, as in contrastive "
                "losses and with statistics of the batch, so the losses of microbatches do not add up to that of the "
                f"batch: set microbatches=1 and no replicas, {_CHOICES}"
            )
        if self._reduction == "sum":
            return (
                "loss= is no sum over rows, as loss_reduction='sum' says: leave loss_reduction out for a mean, and "
                "give weight= if it is a mean over something else than rows"
            )
        if summed:
            return (
                "loss= adds rows up (reduction='sum'), and a pipeline takes it for a mean, so gradients would be "
                "divided by the number of microbatches: set PipelineConfig(loss_reduction='sum'), without weight=, or "
                "let the loss return the mean over rows"
            )
        if self._weighted:
            return (
                "loss= is no mean by weight=, which must return the number of what the loss of a microbatch is the "
                f"mean of, such as (y != -100).sum(): correct it, {_CHOICES}; no weight= makes a function of a mean, "
                "such as its root, a mean"
            )
        return (
            "loss= is no mean over rows: rows do not count equally, as with tokens that are left out (ignore_index), "
            "masks, and weights of classes, or the loss is a function of a mean, such as its root, so the mean of the "
            "losses of microbatches is not the loss of the batch: give weight=, which returns the number of what the "
            f"loss of a microbatch is the mean of, such as lambda x, y: (y != -100).sum(), {_CHOICES}"
        )


def _sample(leaves: Sequence[Any], with_rows: Sequence[bool], batch: Batch, part: slice, rows: slice) -> _Sample:
    """Takes rows of a microbatch whose output has these leaves."""
    chosen = slice(part.start + rows.start, part.start + rows.stop)
    taken = [_copied(leaf[rows] if has_rows else leaf) for leaf, has_rows in zip(leaves, with_rows, strict=True)]
    targets = pytree.tree_map(_copied, batch.targets_of(chosen))
    return _Sample(taken, targets, batch.amount(chosen), rows.stop - rows.start)


def _joined(first: _Sample, second: _Sample, with_rows: Sequence[bool]) -> _Sample:
    """Concatenates rows; leaves without rows are taken from the second sample."""
    leaves = [
        torch.cat([one, other]) if has_rows else other
        for one, other, has_rows in zip(first.leaves, second.leaves, with_rows, strict=True)
    ]
    targets = pytree.tree_map(
        lambda one, other: torch.cat([one, other]) if isinstance(one, Tensor) and one.dim() else other,
        first.targets,
        second.targets,
    )
    return _Sample(leaves, targets, first.amount + second.amount, first.rows + second.rows)


def _measured(gradient: Tensor, parts: Sequence[tuple[Tensor | None, float]], samples: Sequence[_Sample]) -> _Found:
    """Computes the factor between the gradient of all rows and that of each part; each part comes with its loss."""
    small = gradient.element_size() < 4
    whole = gradient.float() if small else gradient
    factors: list[float | None] = []
    start, rest = 0, 0.0
    for sample, (part, loss) in zip(samples, parts, strict=True):
        mine = whole[start : start + sample.rows]
        start += sample.rows
        own = torch.zeros_like(mine) if part is None else part.to(whole.dtype)
        norm = float(own.square().sum())
        factor = float((mine * own).sum()) / norm if norm else 0.0
        factors.append((factor if norm else None) if math.isfinite(loss) else math.nan)
        rest += float((mine - factor * own).square().sum())
    noise, exact = (_NOISE_16, _EXACT_16) if small else (_NOISE, _EXACT)
    return _Found(factors, math.sqrt(rest / float(whole.square().sum())), noise, exact)


def _finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
