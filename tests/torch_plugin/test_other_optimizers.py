"""Optimizers as other packages make them: around another optimizer, with methods of their own."""

from __future__ import annotations

import copy
from abc import ABC
from functools import partial

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.training import same, weights

SIZES = {"a": 3, "b": 2}


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer without a call of torch's ``__init__``, as several packages do."""

    def __init__(self, base):
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.steps = 0

    def step(self, closure=None):
        self.base.step(closure)
        self.steps += 1

    def zero_grad(self):
        self.base.zero_grad()


class WithHooks(Lookahead):
    """Shares the hooks of the optimizer that it wraps."""

    def __init__(self, base):
        super().__init__(base)
        self._optimizer_step_pre_hooks = base._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = base._optimizer_step_post_hooks


class WithPlainHooks(Lookahead):
    """Has hooks of a type to which PyTorch cannot add any."""

    def __init__(self, base):
        super().__init__(base)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}


class Abstract(ABC, torch.optim.SGD):
    """Its first base has no layout in memory of its own."""

    def __init__(self, base):
        super().__init__(base.param_groups, lr=1.0)
        self.steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1


def accumulated(net, optimizer, rank):
    with optimizer.no_sync():
        (sum(value.sum() for value in net.values()) * (rank + 1)).backward()


def by_hand(net, optimizer, rank):
    for value in net.values():
        value.grad = torch.full_like(value, rank + 1.0)


@pytest.mark.parametrize("scheduled", ["before", "after", "never"])
@pytest.mark.parametrize("gradients", [accumulated, by_hand])
@pytest.mark.parametrize("kind", [Lookahead, WithHooks, WithPlainHooks, Abstract])
def test_steps_of_an_optimizer_around_another_one_are_those_of_all_ranks(kind, gradients, scheduled):
    def body(rank):
        net = weights(SIZES)
        optimizer = kind(torch.optim.SGD(net.parameters(), lr=1.0))
        optimizer = with_schedule(optimizer, net, scheduled)
        for _ in range(3):
            optimizer.zero_grad()
            gradients(net, optimizer, rank)
            optimizer.step()
        assert optimizer.steps == 3
        return net.state_dict()

    wanted = {name: value - 3 * 1.5 for name, value in weights(SIZES).state_dict().items()}
    same(each_rank(2, body), wanted)


def with_schedule(optimizer, net, scheduled, **options):
    """Distributes it, with a scheduler that is made before or after; that changes no learning rate."""
    schedule = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
    if scheduled == "before":
        schedule(optimizer)
    optimizer = cd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
    if scheduled == "after":
        schedule(optimizer)
    return optimizer


@pytest.mark.parametrize("scheduled", ["before", "after", "never"])
@pytest.mark.parametrize("kind", [Lookahead, WithHooks, WithPlainHooks, Abstract])
def test_adasum_of_an_optimizer_around_another_one(kind, scheduled):
    """The sum of g and 2 g is 1.5 g."""

    def body(rank):
        net = weights(SIZES)
        optimizer = with_schedule(kind(torch.optim.SGD(net.parameters(), lr=1.0)), net, scheduled, op=cd.Adasum)
        for _ in range(3):
            optimizer.zero_grad()
            by_hand(net, optimizer, rank)
            optimizer.step()
        assert optimizer.steps == 3
        return net.state_dict()

    wanted = {name: value - 3 * 1.5 for name, value in weights(SIZES).state_dict().items()}
    same(each_rank(2, body), wanted)


def test_what_is_no_optimizer_of_torch_is_refused_by_name():
    class Own:
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]

    def body(rank):
        with pytest.raises(cd.ArgumentError, match=r"not a Own, which is no subclass of torch\.optim\.Optimizer"):
            cd.DistributedOptimizer(Own([nn.Parameter(torch.ones(1))]))

    each_rank(2, body)


def test_a_lazy_layer_is_refused_until_it_has_a_shape():
    def body(rank):
        net = nn.LazyLinear(2)
        with pytest.raises(cd.ArgumentError, match="'weight' has no shape yet, for its layer is lazy"):
            cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        net(torch.ones(1, 3))
        cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())

    each_rank(2, body)


def test_a_copy_of_an_optimizer_around_another_one_is_the_plain_one():
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(Lookahead(torch.optim.SGD(net.parameters(), lr=1.0)))
        assert type(copy.copy(optimizer)) is Lookahead

    each_rank(2, body)
