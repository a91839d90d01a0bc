"""The network of NKFlow's tables 1 and 2, and one that takes the same time and sends the same bytes without computing.

Layers that sleep for as long as real ones compute make a pipeline of more ranks than cores as fast as it would be with
a core for each: schedule, messages and reductions are real, only the arithmetic is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Took", "calibrate", "network", "stand_in"]

SIDE, CLASSES = 28, 10
_REPEATS = 7


@dataclass(frozen=True)
class Took:
    """What a layer takes for one microbatch, and what it makes.

    Attributes:
        name: of it.
        forward: seconds.
        backward: seconds.
        output: the shape of its result, without the rows.
        parameters: how many there are.
    """

    name: str
    forward: float
    backward: float
    output: tuple[int, ...]
    parameters: int


def network() -> nn.Sequential:
    """The paper's network (section 4.2), for images of 28 x 28 pixels; its softmax is part of the loss."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, CLASSES),
    )


def calibrate(rows: int, *, repeats: int = _REPEATS) -> list[Took]:
    """Measures each layer of the network on one thread: the shortest of some passes through it, and back."""
    torch.set_num_threads(1)
    found: list[Took] = []
    x = torch.randn(rows, 1, SIDE, SIDE)
    for layer in network():
        readings = [_passes(layer, x.detach().requires_grad_(len(found) > 0)) for _ in range(repeats)]
        y = layer(x).detach()
        forward, backward = (min(times) for times in zip(*readings, strict=True))
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        found.append(Took(type(layer).__name__, forward, backward, tuple(y.shape[1:]), parameters))
        x = y
    return found


def _passes(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    begin = time.perf_counter()
    y = layer(x)
    middle = time.perf_counter()
    if y.requires_grad:
        y.backward(torch.ones_like(y))
    return middle - begin, time.perf_counter() - middle


def stand_in(took: Sequence[Took]) -> nn.Sequential:
    """Layers that sleep as long, make results of the same shape, and have as many parameters."""
    return nn.Sequential(*map(_Asleep, took))


class _Asleep(nn.Module):
    """Sleeps forward and backward."""

    def __init__(self, took: Took) -> None:
        super().__init__()
        self.took = took
        self.weight = nn.Parameter(torch.zeros(max(1, took.parameters)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(x, self.weight, self.took)  # type: ignore[no-untyped-call] # it has no types
        return result


class _Sleep(torch.autograd.Function):
    """Real memory is made and filled; what that takes is a part of the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, took: Took) -> Tensor:
        until = time.perf_counter() + took.forward
        ctx.took, ctx.shapes, ctx.wants = took, (x.shape, weight.shape), x.requires_grad
        result = x.new_zeros(len(x), *took.output)
        _sleep(until)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        until = time.perf_counter() + ctx.took.backward
        inputs, weights = ctx.shapes
        (gradient,) = gradients
        found = gradient.new_zeros(inputs) if ctx.wants else None, gradient.new_zeros(weights), None
        _sleep(until)
        return found


def _sleep(until: float) -> None:
    if (rest := until - time.perf_counter()) > 0:
        time.sleep(rest)
