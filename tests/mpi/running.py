"""Running statistics of batch normalisation, found without stages."""

from __future__ import annotations

import torch
from torch import nn


class Statistics:
    """Running statistics of a plain model, of all rows of a batch, however many parts it comes in."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))]
        self._seen: list[list[torch.Tensor]] = [[] for _ in self._norms]
        for norm, seen in zip(self._norms, self._seen, strict=True):
            norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach().clone()))
        self._before = [self._copied(norm) for norm in self._norms]

    def update(self) -> None:
        """Takes what a step has seen for one batch."""
        for norm, seen, (mean, variance, count) in zip(self._norms, self._seen, self._before, strict=True):
            rows = torch.cat(seen)
            dims = [dim for dim in range(rows.dim()) if dim != 1]
            norm.running_mean.copy_(mean.lerp(rows.mean(dims), norm.momentum))
            norm.running_var.copy_(variance.lerp(rows.var(dims), norm.momentum))
            norm.num_batches_tracked.copy_(count + 1)
            seen.clear()
        self._before = [self._copied(norm) for norm in self._norms]

    @staticmethod
    def _copied(norm: nn.Module) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in (norm.running_mean, norm.running_var, norm.num_batches_tracked)]
