"""Steps with a closure, which computes the gradients anew each time that the optimizer calls it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.training import alone, model, same, settled, together, weights, wrapped

mse = nn.functional.mse_loss


def closure_step(net, optimizer, inputs, targets):
    def closure():
        optimizer.zero_grad()
        loss = mse(net(inputs), targets)
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None


OPTIMIZERS = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "LBFGS": lambda net: torch.optim.LBFGS(net.parameters(), lr=0.2, max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_is_reduced_each_time_it_is_called(name):
    same(together(2, make=OPTIMIZERS[name], step=closure_step), alone(2, make=OPTIMIZERS[name], step=closure_step))


@pytest.mark.parametrize("give", [lambda loss: loss, lambda loss: loss.item()])
def test_a_line_search_goes_the_same_way_on_all_ranks(give):
    """It decides by the loss, so all ranks must have the same one: that of the joined batch."""

    def search(net):
        return torch.optim.LBFGS(net.parameters(), max_iter=8, line_search_fn="strong_wolfe")

    def step(net, optimizer, inputs, targets):
        def closure():
            optimizer.zero_grad()
            loss = mse(net(inputs), targets)
            loss.backward()
            return give(loss)

        assert type(optimizer.step(closure)) is type(give(torch.tensor(0.0)))

    same(together(2, make=search, step=step), alone(2, make=search, step=step))


def test_a_closure_may_return_nothing_or_what_is_no_number():
    def step(net, optimizer, inputs, targets):
        def closure():
            optimizer.zero_grad()
            mse(net(inputs), targets).backward()
            return given

        for given in (None, ("loss", 3)):
            assert optimizer.step(closure) is given

    same(together(2, step=step), alone(2, step=step))


def test_the_loss_of_a_closure_is_reduced_as_its_gradients_are():
    def body(rank):
        net = model()
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=cd.Sum)
        return optimizer.step(lambda: rank + 1)

    assert each_rank(2, body) == [3.0, 3.0]


def test_a_closure_may_come_by_keyword():
    def step(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        optimizer.step(closure=lambda: mse(net(inputs), targets).backward())

    same(together(2, step=step), alone(2))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_closure_adds_to_what_was_accumulated_before(steps):
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net)
        for _ in range(steps):
            settled(net, optimizer)
        optimizer.zero_grad()
        before = {name: value.detach().clone() for name, value in net.items()}
        with optimizer.no_sync():
            (net["a"] * (rank + 1)).sum().backward()

        def closure():
            (net["b"] * (rank + 3)).sum().backward()
            return 0.0

        optimizer.step(closure)
        return {name: (before[name] - value).unique().tolist() for name, value in net.items()}

    assert each_rank(2, body) == [{"a": [1.5], "b": [3.5]}] * 2
