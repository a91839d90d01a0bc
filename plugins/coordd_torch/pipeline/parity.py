"""The gradients of a model in one piece, and how far those of its stages are from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from coordd_torch.pipeline.batch import Batch
from coordd_torch.pipeline.stage import Loss

__all__ = ["Gradients", "distance", "gradients"]

Gradients = Mapping[str, Tensor | None]
"""By the names of parameters, a tied one under all of its names; None where nothing leads to one."""


def gradients(whole: nn.Module, batch: Batch, loss: Loss) -> Gradients:
    """Accumulates the gradients of a batch over its microbatches.

    Args:
        whole: takes the inputs by name.
        batch: what is gone through.
        loss: of what the model gives, and targets.
    """
    whole.zero_grad()
    for number in range(batch.count):
        if share := batch.share(number):
            found: Any = loss(whole(batch.inputs(number)), batch.targets(number))
            (found * share).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters(remove_duplicate=False)}


def distance(mine: Gradients, others: Gradients) -> float:
    """Finds the largest difference of one gradient's values, of those that the first ones name."""
    return max((_distance(gradient, others[name]) for name, gradient in mine.items()), default=0.0)


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        present = [gradient for gradient in (one, other) if gradient is not None]
        return max((float(gradient.abs().max()) for gradient in present), default=0.0)
    return float((one - other).abs().max()) if one.numel() else 0.0
