"""Cleanup of the attributes that a loss scaler sets on optimizers that unscale themselves, as fused and Adasum ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["forget_scale", "forgets_scale"]

_SET = ("grad_scale", "found_inf")
"""Set by ``scaler.step``, which removes them only after a step without an error, and multiplies by existing values."""


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Removes the attributes."""
    for name in _SET:
        vars(optimizer).pop(name, None)


def forgets_scale(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a hook of an optimizer's ``step`` so that an error removes the scale, which would otherwise count twice."""

    @functools.wraps(hook)
    def forgetting(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        try:
            return hook(optimizer, args, kwargs)
        except BaseException:
            forget_scale(optimizer)
            raise

    return forgetting
