"""Trains a model of many equal layers, in stages or in one piece, and reports the peak memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coordd.torch as cd
from coordd_tools.stages.memory import peak

__all__ = ["measure"]

_ROWS, _MICROBATCHES, _STEPS = 32, 8, 3


def measure(*, layers: int, width: int, whole: bool) -> dict[str, Any]:
    """Returns the losses of some steps, and the peak resident bytes of each rank."""
    torch.set_num_threads(1)
    x = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(1))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(_Layer(width) for _ in range(layers)))

    if whole:
        losses = _in_one_piece(build(), x)
        return {"losses": losses, "peaks": [peak()]}
    cd.init()
    config = cd.PipelineConfig(microbatches=_MICROBATCHES)
    pipe = cd.Pipeline(build, config, optimizer=_adam, loss=mse_loss)
    losses = [pipe.train_batch(x, x) for _ in range(_STEPS)]
    found = {"losses": losses, "peaks": cd.allgather_object(peak())}
    cd.shutdown()
    return found


class _Layer(nn.Module):
    """A residual layer: ``x + tanh(W x)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def _adam(parameters: Any) -> torch.optim.Optimizer:
    """Returns AdamW, which keeps two values of state per parameter."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def _in_one_piece(model: nn.Module, x: Tensor) -> list[float]:
    optimizer, losses = _adam(model.parameters()), []
    for _ in range(_STEPS):
        total = 0.0
        for rows in x.chunk(_MICROBATCHES):
            loss = mse_loss(model(rows), rows) / _MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
