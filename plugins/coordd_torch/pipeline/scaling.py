"""Loss scaling in a pipeline: one scale on all ranks, and steps that all of them skip, or none."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Scaling"]


class Scaling:
    """A `torch.amp.GradScaler` of which each rank has one like it.

    What one rank finds in its gradients, all must enter into their scalers, also those that have no gradients. So each
    has a *ballot* besides: a parameter of nobody's, whose gradient is infinite if the step is to be skipped.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        """Takes a scaler, which is nobody else's from now on.

        Args:
            scaler: may be a disabled one, which changes nothing.
        """
        self._scaler = scaler
        self._ballot = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        self._vote = torch.optim.SGD([self._ballot], lr=0.0)

    @property
    def scale(self) -> float:
        """By which losses are multiplied."""
        return float(self._scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        """Multiplies a loss."""
        found: Tensor = self._scaler.scale(loss)
        return found

    def unscale(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Divides the gradients of optimizers, but for those that have none."""
        self.scaled(self._ballot.detach())  # or a rank that never scales a loss would have no scale
        for optimizer in optimizers:
            if any(value.grad is not None for group in optimizer.param_groups for value in group["params"]):
                self._scaler.unscale_(optimizer)

    def update(self, *, finite: bool) -> None:
        """Changes the scale after a step.

        Args:
            finite: whether all gradients of all ranks are; the same on all of them.
        """
        self._ballot.grad = torch.full_like(self._ballot, 0.0 if finite else math.inf)
        self._scaler.unscale_(self._vote)
        self._scaler.update()
