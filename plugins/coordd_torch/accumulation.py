"""Local gradient accumulation: checks that accumulated gradients are as backward left them.

Also defines the other errors of a `DistributedOptimizer` that is used wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from coordd.errors import ArgumentError, CoorddError
from coordd.negotiation.tensor_table import Site, show_site

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
    """State of the gradients after the last backward pass that only accumulated."""

    def __init__(self) -> None:
        self._seen: list[tuple[Gradient, torch.Tensor | None]] = []

    def observe(self, gradients: Iterable[Gradient]) -> None:
        """Records the tensors of these gradients, their version counters, and their largest values."""
        self._seen = []
        for gradient in gradients:
            gradient.remember()
            self._seen.append((gradient, gradient.largest()))

    def forget(self) -> None:
        """Clears the record when the step has ended."""
        self._seen = []

    def check(self, gradients: Iterable[Gradient]) -> str:
        """Returns an error text for the first of these gradients that was changed since, by clipping, say, or ""."""
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
    """Returns the error for a gradient that was computed again when its step was due.

    Args:
        gradient: the first such gradient.
        passes: the declared ``backward_passes_per_step``.
        nested: whether reentrant checkpoints ran passes inside this one.
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
    """Returns the error for a gradient that a backward pass may have computed without calling its hook."""
    text = (
        f"{name!r} has a gradient, and autograd does not call the hook that tells when backward has made one, because "
        "PyTorch has swapped parameters (torch.__future__.set_swap_module_params_on_conversion, "
        "torch.utils.swap_tensors). The hooks are back now: clear the gradients, and compute them again. To avoid "
        "this, call optimizer.zero_grad() between such a conversion of the model and the next backward()"
    )
    return ArgumentError(text)


def compiled() -> ArgumentError:
    """Returns the error for a backward pass of compiled autograd, which does not report when gradients are ready."""
    text = (
        "this backward pass is compiled (torch._dynamo.config.compiled_autograd), and does not tell when gradients are "
        "complete: turn that off; torch.compile(model), also around backward(), works without it"
    )
    return ArgumentError(text)


def is_compiled() -> bool:
    """Returns whether compiled autograd runs the current backward pass."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def inside_backward() -> CoorddError:
    """Returns the error for a call of `step` while backward runs."""
    text = (
        "step() was called inside a backward pass, by a hook of a gradient: gradients are those of all ranks when "
        "backward() returns, so call step() after it (an optimizer inside the backward pass is not supported)"
    )
    return CoorddError(text)


def replaced() -> ArgumentError:
    """Returns the error for an optimizer whose parameters another `DistributedOptimizer` took over."""
    text = (
        "another DistributedOptimizer was made for parameters of this one, and reduces their gradients now; use one "
        "for all parameters, or let each have its own"
    )
    return ArgumentError(text)


def not_all_have_repeated(site: Site) -> str:
    """Returns the end of a sentence that says that this rank ran a backward pass that other ranks did not run."""
    return (
        f"has made another backward pass at {show_site(site)}, and not all ranks have, or a rank has joined: put all "
        "backward passes of a step but the last one into optimizer.no_sync()"
    )
