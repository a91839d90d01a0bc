"""Buffers that a forward pass writes to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.buffers import borrowed, copies, every
from tests.torch_pipeline.stages import Stage, same


class Counting(nn.Module):
    """Counts its passes, in place and anew, and saves the count for the backward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("inside", torch.ones(()))
        self.register_buffer("anew", torch.ones(()))
        self.register_buffer("idle", torch.ones(1000))
        self.same = nn.Module()
        self.same.register_buffer("inside", self.inside)

    def forward(self, x):
        self.inside.add_(1)
        self.anew = self.anew + 1
        return self.linear(x) * self.same.inside * self.anew


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def counts(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}


@pytest.mark.parametrize(
    "make",
    [Counting, lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), lambda: nn.BatchNorm1d(3)],
)
def test_computing_again_finds_and_leaves_them_as_in_the_plain_run(make):
    torch.manual_seed(0)
    plain, batches = make(), [torch.randn(4, 3) for _ in range(3)]
    ours = copy.deepcopy(plain)
    stage = Boundary(Stage(ours, ["x"], ["y"]), recompute=True)
    held = [stage.forward(number, {}, {"x": batch})["y"].square().sum() for number, batch in enumerate(batches)]
    collected = counts(ours)
    for number, loss in enumerate(held):
        stage.backward(number, loss)
    same(counts(ours), collected)
    for batch in batches:
        plain(batch).square().sum().backward()
    same(gradients(ours), gradients(plain))
    if not isinstance(plain, nn.BatchNorm1d):
        same(counts(ours), counts(plain))


def test_what_is_written_to_only_later_is_refused():
    class Late(Counting):
        def forward(self, x):
            if len(x) == 2:
                self.idle.mul_(2)
            return super().forward(x)

    stage = Boundary(Stage(Late(), ["x"], ["y"]), recompute=True)
    stage.forward(0, {}, {"x": torch.randn(1, 3)})
    with pytest.raises(ArgumentError, match="writes to the buffer 'idle', and the first one did not"):
        stage.forward(1, {}, {"x": torch.randn(2, 3)})


def test_borrowed_ones_are_written_to_instead():
    module = Counting()
    before = counts(module)
    with borrowed(copies(every(module))):
        module(torch.randn(2, 3))
        assert module.same.inside is module.inside
        assert module.inside == 2
    same(counts(module), before)
    assert module.same.inside is module.inside
