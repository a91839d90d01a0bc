"""What waits for the end of a backward pass: in the same order on all ranks, and told if the pass fails."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd_torch import backward_pass
from coordd_torch.backward_pass import BackwardPass
from tests.local_ranks import each_rank
from tests.torch_plugin.training import weights


def ignore(_error):
    pass


def run(orders, *, fails=False):
    """A pass in which each of these waits for the end; returns of whom it was told that it ended, or failed."""
    ended, failed = [], []
    parameters = [nn.Parameter(torch.ones(1)) for _ in orders]

    def wait(order):
        def hook(_):
            BackwardPass(lambda: ended.append(order), lambda: failed.append(order), ignore, order=order)

        return hook

    for parameter, order in zip(parameters, orders, strict=True):
        parameter.register_post_accumulate_grad_hook(wait(order))
    last = nn.Parameter(torch.ones(1))
    if fails:
        last.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    value = (last * 2).exp()  # its gradient is the last one
    for parameter in parameters:
        value = value * parameter
    if fails:
        with pytest.raises(ZeroDivisionError):
            value.sum().backward()
    else:
        value.sum().backward()
    gc.collect()
    assert not backward_pass._running
    return ended, failed


@pytest.mark.parametrize("orders", ["abc", "cba", "bca"])
def test_the_order_does_not_depend_on_that_of_the_gradients(orders):
    assert run(orders) == (["a", "b", "c"], [])


def test_a_pass_that_fails_is_told():
    ended, failed = run("ba", fails=True)
    assert not ended
    assert sorted(failed) == ["a", "b"]


def test_an_error_at_the_end_is_a_failure_for_those_that_come_later():
    """They hear of it before the script does, although autograd keeps the object that has raised."""
    told = []

    def fail():
        raise KeyError

    def hook(_):
        BackwardPass(lambda: told.append("late ended"), lambda: told.append("late failed"), ignore, order="b")
        BackwardPass(fail, lambda: told.append("early failed"), told.append, order="a")

    parameter = nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(hook)
    try:
        parameter.sum().backward()
    except KeyError:
        assert [type(told[0]), *told[1:]] == [KeyError, "late failed"]
    else:
        pytest.fail("the error is lost")


def bad():
    """Reads a batch that cannot be read."""
    raise ValueError


def test_a_step_of_two_optimizers_that_fails_on_one_rank_is_discarded_for_both():
    def body(rank):
        back, head = weights({"back": 2}), weights({"head": 2})
        optimizers = [cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in (back, head)]
        made = []
        for number in range(7):
            try:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                weight = bad() if (rank, number) == (1, 3) else rank + 1
                (back["back"] * head["head"] * weight).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                made.append(number)
            except (ValueError, cd.DiscardedStepError):
                for optimizer in optimizers:
                    optimizer.discard_step()
        return made, back["back"].tolist(), head["head"].tolist()

    first, second = each_rank(2, body)
    assert first == second
    assert first[0] == [0, 1, 2, 4, 5, 6]


def test_two_optimizers_whose_gradients_come_in_another_order_on_each_rank():
    """As in a graph that depends on the data."""

    def body(rank):
        nets = [weights({"weight": 2}) for _ in range(2)]
        optimizers = [cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            first, second = nets if (rank + step) % 2 else nets[::-1]
            value = torch.tanh(first["weight"] * 0.5)
            (value * second["weight"]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return [net["weight"].tolist() for net in nets]

    first, second = each_rank(2, body)
    assert first == second
