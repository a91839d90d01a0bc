"""Loss scaling in a pipeline: one scale on all ranks, and either all ranks skip a step or none does."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Scaling"]


class Scaling:
    """A `torch.amp.GradScaler` kept equal on all ranks.

    All ranks must pass the same result to their scalers, also ranks without gradients. So each has a *ballot* besides:
    a dummy parameter, whose gradient is infinite if the step is to be skipped.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        """Takes ownership of a scaler.

        Args:
            scaler: may be disabled, and then changes nothing.
        """
        self._scaler = scaler
        self._ballot = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        self._vote = torch.optim.SGD([self._ballot], lr=0.0)

    @property
    def scale(self) -> float:
        """Factor that losses are multiplied by."""
        return float(self._scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        """Multiplies a loss."""
        found: Tensor = self._scaler.scale(loss)
        return found

    def unscale(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Divides gradients by the scale; optimizers without gradients are skipped."""
        self.scaled(self._ballot.detach())  # initialises the scale on ranks that never scale a loss
        for optimizer in optimizers:
            if any(value.grad is not None for group in optimizer.param_groups for value in group["params"]):
                self._scaler.unscale_(optimizer)

    def update(self, *, finite: bool) -> None:
        """Updates the scale after a step.

        Args:
            finite: whether all gradients of all ranks are finite; the same on all ranks.
        """
        self._ballot.grad = torch.full_like(self._ballot, 0.0 if finite else math.inf)
        self._scaler.unscale_(self._vote)
        self._scaler.update()
