"""Finalises the gradients of a rank between its last backward pass and its optimizer step, for all its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from coordd.daemon.operations import Operations
from coordd_torch.pipeline.norm import clip
from coordd_torch.pipeline.scaling import Scaling

__all__ = ["Settling"]


class Settling:
    """Completes, unscales and clips gradients, once per step."""

    def __init__(
        self,
        complete: Callable[[], None],
        counted: Sequence[nn.Parameter],
        others: Collection[nn.Parameter],
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        clip_norm: float | None,
        scaling: Scaling | None,
        operations: Operations,
        name: str,
    ) -> None:
        """Stores the parameters and settings.

        Args:
            complete: waits until gradients are reduced over all ranks.
            counted: the parameters whose gradients this rank counts in the norm.
            others: the parameters that another rank counts.
            optimizers: of this rank.
            clip_norm: the largest norm of all gradients together; None for no limit.
            scaling: of the loss, if there is any.
            operations: of the daemon.
            name: of the reduction.
        """
        self._complete = complete
        self._counted = counted
        self._others = others
        self._optimizers = optimizers
        self._most = math.inf if clip_norm is None else clip_norm
        self._scaling = scaling
        self._operations = operations
        self._name = name
        self._settled = False
        self._steps = True

    def begin(self) -> None:
        """Prepares the next step."""
        self._settled = False

    def settle(self) -> bool:
        """Finalises gradients on the first call of a step; returns whether all ranks take the step or all skip it.

        All ranks call it for the same step.
        """
        self._complete()
        if not self._settled:
            self._settled = True
            self._steps = self._made_usable()
        return self._steps

    def _made_usable(self) -> bool:
        if self._scaling is None:
            if self._most < math.inf:
                self._clipped()
            return True
        self._scaling.unscale(self._optimizers)
        finite = math.isfinite(self._clipped())
        self._scaling.update(finite=finite)
        return finite

    def _clipped(self) -> float:
        return clip(_grads(self._counted), _grads(self._others), self._most, self._operations, name=self._name)


def _grads(parameters: Collection[nn.Parameter]) -> list[Tensor]:
    return [value.grad for value in parameters if value.grad is not None]
