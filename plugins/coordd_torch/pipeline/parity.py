"""Gradients of the unsplit model, and their distance from the gradients of its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from coordd_torch.pipeline.rows import taken
from coordd_torch.pipeline.stage import Loss

__all__ = ["Gradients", "distance", "gradients"]

Gradients = Mapping[str, Tensor | None]
"""By parameter name, a tied parameter under all its names; None for a parameter without gradient."""


def gradients(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    *,
    run: Callable[[nn.Module, Any], Any],
    loss: Loss,
    shares: Sequence[tuple[slice, float]],
) -> Gradients:
    """Computes the gradients of a batch with the unsplit model, on all rows at once.

    If the model normalises rows with batch statistics, the gradients of microbatches differ from those of the batch, so
    it runs microbatch by microbatch.

    Args:
        model: unsplit; it is changed.
        inputs: of the model.
        targets: of the loss.
        run: calls the model.
        loss: of the model's output and targets.
        shares: the microbatches, and the share of each one's loss in that of the batch.
    """
    if not model.training:
        model.train()  # otherwise modules in evaluation mode are so on purpose
    model.zero_grad()
    for part, share in shares if _mixes(model) else [(slice(None), 1.0)]:
        if share:
            own = pytree.tree_map_only(torch.Tensor, torch.clone, taken(inputs, part))  # the model may write to them
            (loss(run(model, own), taken(targets, part)) * share).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def distance(mine: Gradients, others: Gradients) -> float:
    """Returns the largest absolute difference of gradient values, over the parameters in `mine`."""
    return max((_distance(gradient, others[name]) for name, gradient in mine.items()), default=0.0)


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        present = [gradient for gradient in (one, other) if gradient is not None]
        return max((float(gradient.abs().max()) for gradient in present), default=0.0)
    alike = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().nan_to_num(nan=math.inf).masked_fill(alike, 0.0)
    return float(apart.max()) if apart.numel() else 0.0


def _mixes(model: nn.Module) -> bool:
    norm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - their base class
    return any(isinstance(module, norm) and module.training for module in model.modules())
