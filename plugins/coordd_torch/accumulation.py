"""Gradients that one rank has accumulated alone: whether they are as backward left them, and what is said if not.

The other errors of an optimizer that is used wrongly are here, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from coordd.errors import ArgumentError, CoorddError
from coordd.table import Site, show_site

if TYPE_CHECKING:
    from coordd_torch.gradient import Gradient

__all__ = [
    "Accumulated",
    "compiled",
    "inside_backward",
    "is_compiled",
    "not_all_have_repeated",
    "replaced",
    "too_many",
    "without_hook",
]


class Accumulated:
    """What the gradients were after the last backward pass that has only accumulated."""

    def __init__(self) -> None:
        self._seen: list[tuple[Gradient, torch.Tensor | None]] = []

    def observe(self, gradients: Iterable[Gradient]) -> None:
        """Sees what these are: their tensors, how often those were changed, and their largest values."""
        self._seen = []
        for gradient in gradients:
            gradient.remember()
            self._seen.append((gradient, gradient.largest()))

    def forget(self) -> None:
        """Forgets them, for the step has ended."""
        self._seen = []

    def check(self, gradients: Iterable[Gradient]) -> str:
        """Says of the first of these that was changed since then, by clipping, say, that it was; empty if none was."""
        these = {id(gradient) for gradient in gradients}
        for gradient, largest in self._seen:
            if id(gradient) in these and gradient.meddled(largest):
                return (
                    f"the gradient of {gradient.name!r} was changed on this rank before it was averaged: after an "
                    "accumulation that is not complete, call optimizer.synchronize() before you clip, unscale or "
                    "change gradients, or optimizer.zero_grad() if you have given it up"
                )
        return ""


class TooManyPassesError(CoorddError, AssertionError):
    """A gradient was computed more often than declared; Horovod raises an `AssertionError`."""


def too_many(gradient: Gradient, passes: int, *, nested: bool) -> CoorddError:
    """Says that a gradient was computed when its step should have been made.

    Args:
        gradient: the first that was.
        passes: what was declared as ``backward_passes_per_step``.
        nested: whether reentrant checkpoints have made passes inside this one.
    """
    if nested:
        text = (
            f"{gradient.name!r} is computed in several reentrant checkpoints of one backward pass, or in one and "
            "outside, so no hook tells when it is complete: use checkpoint(..., use_reentrant=False)"
        )
    else:
        text = (
            "Gradients were computed more than backward_passes_per_step times before call to step() "
            f"({gradient.name!r}, {passes}). Increase backward_passes_per_step to accumulate "
            "gradients locally, or put all backward passes of a step but the last one into "
            "optimizer.no_sync(); to skip a step, clear them by optimizer.zero_grad()."
        )
    return TooManyPassesError(text)


def without_hook(name: str) -> ArgumentError:
    """Says that a backward pass may have made a gradient without a call of its hook."""
    text = (
        f"{name!r} has a gradient, and autograd does not call the hook that tells when backward has made one, because "
        "PyTorch has swapped parameters (torch.__future__.set_swap_module_params_on_conversion, "
        "torch.utils.swap_tensors). The hooks are back now: clear the gradients, and compute them again. To avoid "
        "this, call optimizer.zero_grad() between such a conversion of the model and the next backward()"
    )
    return ArgumentError(text)


def compiled() -> ArgumentError:
    """Says that gradients cannot be reduced as they are computed by compiled autograd."""
    text = (
        "this backward pass is compiled (torch._dynamo.config.compiled_autograd), and does not tell when gradients are "
        "complete: turn that off; torch.compile(model), also around backward(), works without it"
    )
    return ArgumentError(text)


def is_compiled() -> bool:
    """Whether compiled autograd runs the present backward pass."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def inside_backward() -> CoorddError:
    """Says that a step cannot be made while backward runs."""
    text = (
        "step() was called inside a backward pass, by a hook of a gradient: gradients are those of all ranks when "
        "backward() returns, so call step() after it (an optimizer inside the backward pass is not supported)"
    )
    return CoorddError(text)


def replaced() -> ArgumentError:
    """Says that an optimizer has lost its parameters to another one."""
    text = (
        "another DistributedOptimizer was made for parameters of this one, and reduces their gradients now; use one "
        "for all parameters, or let each have its own"
    )
    return ArgumentError(text)


def not_all_have_repeated(site: Site) -> str:
    """Says, as the end of a sentence, that this rank has made a pass that others have not made."""
    return (
        f"has made another backward pass at {show_site(site)}, and not all ranks have, or a rank has joined: put all "
        "backward passes of a step but the last one into optimizer.no_sync()"
    )
