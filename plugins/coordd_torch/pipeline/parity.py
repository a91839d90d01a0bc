"""The gradients of a model in one piece, and how far those of its stages are from them."""

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
"""By the names of parameters, a tied one under all of its names; None where nothing leads to one."""


def gradients(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    *,
    run: Callable[[nn.Module, Any], Any],
    loss: Loss,
    shares: Sequence[tuple[slice, float]],
) -> Gradients:
    """Finds the gradients of a batch, all of whose rows a model gets at a time.

    Where it normalises rows by others, microbatches have other gradients than the batch, so it gets one by one.

    Args:
        model: in one piece, which is changed.
        inputs: of it.
        targets: of the loss.
        run: calls the model.
        loss: of what the model gives, and targets.
        shares: the microbatches, and how much of the batch each one's loss is.
    """
    if not model.training:
        model.train()  # else what is not in training is so on purpose
    model.zero_grad()
    for part, share in shares if _mixes(model) else [(slice(None), 1.0)]:
        if share:
            own = pytree.tree_map_only(torch.Tensor, torch.clone, taken(inputs, part))  # it may write to them
            (loss(run(model, own), taken(targets, part)) * share).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def distance(mine: Gradients, others: Gradients) -> float:
    """Finds the largest difference of one gradient's values, of those that the first ones name."""
    return max((_distance(gradient, others[name]) for name, gradient in mine.items()), default=0.0)


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        present = [gradient for gradient in (one, other) if gradient is not None]
        return max((float(gradient.abs().max()) for gradient in present), default=0.0)
    alike = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().nan_to_num(nan=math.inf).masked_fill(alike, 0.0)
    return float(apart.max()) if apart.numel() else 0.0


def _mixes(model: nn.Module) -> bool:
    norm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - what all of them are
    return any(isinstance(module, norm) and module.training for module in model.modules())
