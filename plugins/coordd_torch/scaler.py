"""What a loss scaler sets on an optimizer that looks at the scale itself, as fused ones and those of Adasum do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["forgets_scale"]

_SET = ("grad_scale", "found_inf")
"""By ``scaler.step``, which takes them off only after a step that was made, and multiplies by what it finds there."""


def forgets_scale(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a hook of an optimizer's ``step`` take the scale off if it raises an error, lest it counts twice."""

    @functools.wraps(hook)
    def forgetting(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        try:
            return hook(optimizer, args, kwargs)
        except BaseException:
            for name in _SET:
                vars(optimizer).pop(name, None)
            raise

    return forgetting
