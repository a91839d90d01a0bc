"""The network of NKFlow's tables 1 and 2, and a stand-in with the same times and message sizes that does not compute.

With layers that sleep for as long as real ones compute, a pipeline of more ranks than cores is as fast as with a core
for each rank: schedule, messages and reductions are real, only the arithmetic is not.
"""

from __future__ import annotations

import functools
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
    """The times of a layer for one microbatch, and the size of its output and parameters.

    Attributes:
        name: the class of the layer.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        output: the shape of its output, without the rows.
        parameters: the number of parameters.
    """

    name: str
    forward: float
    backward: float
    output: tuple[int, ...]
    parameters: int


def network() -> nn.Sequential:
    """Returns the paper's network (section 4.2), for images of 28 x 28 pixels; its softmax is part of the loss."""
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
    """Measures each layer of the network on one thread: the shortest of several forward and backward passes."""
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
    """Returns layers that sleep as long, have outputs of the same shape, and have as many parameters."""
    clock = _Clock()
    return nn.Sequential(*(_Asleep(each, clock) for each in took))


class _Clock:
    """A clock that sleeps; oversleeping, because a core was busy, shortens the next sleep."""

    def __init__(self) -> None:
        self._behind = 0.0

    def sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        if (rest := seconds - self._behind) > 0:
            time.sleep(rest)
        self._behind += time.perf_counter() - begin - seconds


class _Asleep(nn.Module):
    """A layer that sleeps in its forward and backward pass."""

    def __init__(self, took: Took, clock: _Clock) -> None:
        super().__init__()
        self.took = took
        self.clock = clock
        self.weight = nn.Parameter(torch.zeros(max(1, took.parameters)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call] # it has no types
        return result


class _Sleep(torch.autograd.Function):
    """Sleeps and returns cached zeros: filling memory takes a core's time, which for real layers is part of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _Asleep) -> Tensor:
        ctx.layer, ctx.shapes, ctx.wants = layer, (tuple(x.shape), tuple(weight.shape)), x.requires_grad
        layer.clock.sleep(layer.took.forward)
        return _zeros((len(x), *layer.took.output)).detach()

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        inputs, weights = (_zeros(shape).detach() for shape in ctx.shapes)
        ctx.layer.clock.sleep(ctx.layer.took.backward)
        return inputs if ctx.wants else None, weights, None


@functools.cache
def _zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape)
