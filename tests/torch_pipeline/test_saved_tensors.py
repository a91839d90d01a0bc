"""What a graph has saved, and what of it is let go between the halves of a split backward pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from coordd_torch.pipeline.saved_tensors import Shelf
from coordd_torch.pipeline.split import SplitBackward


class Watched(nn.Module):
    """Remembers, without keeping it, where what comes in and goes out lies."""

    def __init__(self, module):
        super().__init__()
        self.module, self.memory = module, []

    def forward(self, x):
        y = self.module(x)
        self.memory = [weakref.ref(x.untyped_storage()), weakref.ref(y.untyped_storage())]
        return y

    @property
    def alive(self):
        gc.collect()
        return [memory() is not None for memory in self.memory]


def split(module, x):
    shelf = Shelf()
    with shelf.filling():
        edge = get_gradient_edge(module(x))
    return SplitBackward([edge], [torch.ones(5, 4)], [x], shelf=shelf)


def test_only_what_the_second_pass_needs_is_kept_for_it():
    gelu, softmax, linear = Watched(nn.GELU()), Watched(nn.Softmax(-1)), Watched(nn.Linear(4, 4))
    module = nn.Sequential(nn.Linear(4, 4), gelu, linear, softmax)
    halves = split(module, torch.randn(5, 4, requires_grad=True))
    assert gelu.alive == [True, True]
    assert softmax.alive == [False, True]
    halves.first()
    assert gelu.alive == [
        False,
        True,
    ]  # what comes out goes into the next layer, whose weight has a gradient yet to come
    assert softmax.alive == [False, False]
    halves.second()
    assert linear.alive == [False, False]
    assert module[0].weight.grad is not None


def test_what_is_not_gone_back_through_is_freed_with_the_graph():
    exponential = Watched(torch.exp)
    halves = split(exponential, torch.randn(5, 4, requires_grad=True))
    assert exponential.alive[1]
    del halves
    assert exponential.alive == [False, False]


def test_a_change_in_place_is_noticed():
    shelf, x = Shelf(), torch.randn(5, 4, requires_grad=True)
    with shelf.filling():
        y = x.exp()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(5, 4\) that is needed for the backward pass was changed in place"):
        y.sum().backward()


def test_a_function_may_ask_twice_for_what_it_saved():
    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0] + gradient * ctx.saved_tensors[0]

    x = torch.randn(5, 4, requires_grad=True)
    halves = split(Asking.apply, x)
    halves.first()
    halves.second()
    torch.testing.assert_close(x.grad, 2 * x.detach())
