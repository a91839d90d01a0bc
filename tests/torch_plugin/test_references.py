"""Gradients to which the script refers: ``.grad`` stays the tensor that it is, as under PyTorch alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd_torch.references import are_referenced
from tests.local_ranks import each_rank
from tests.torch_plugin.training import LARGE, WAYS, alone, same, settled, together, weights, wrapped


def loss_of(net, inputs, targets):
    return nn.functional.mse_loss(net(inputs), targets)


def one_buffer(net, optimizer, inputs, targets):
    """All gradients are views of one tensor, which is cleared and clipped as a whole."""
    if not hasattr(net, "buffer"):
        parameters = list(net.parameters())
        net.buffer = torch.zeros(sum(map(torch.numel, parameters)), dtype=torch.float64)
        for parameter, part in zip(parameters, net.buffer.split([*map(torch.numel, parameters)]), strict=True):
            parameter.grad = part.view_as(parameter)
    net.buffer.zero_()
    loss_of(net, inputs, targets).backward()
    net.buffer.clamp_(-0.05, 0.05)
    optimizer.step()


def a_list(net, optimizer, inputs, targets):
    """The list of all gradients is made once."""
    optimizer.zero_grad(set_to_none=False)
    loss_of(net, inputs, targets).backward()
    if not hasattr(net, "gradients"):
        net.gradients = [parameter.grad for parameter in net.parameters()]
    torch._foreach_mul_(net.gradients, 0.3)
    optimizer.step()


def arrays(net, optimizer, inputs, targets):
    """So is one of arrays that share their memory."""
    optimizer.zero_grad(set_to_none=False)
    loss_of(net, inputs, targets).backward()
    if not hasattr(net, "arrays"):
        net.arrays = [parameter.grad.numpy() for parameter in net.parameters()]
    for array in net.arrays:
        np.multiply(array, 0.3, out=array)
    optimizer.step()


def by_data(net, optimizer, inputs, targets):
    """Between two passes gradients get other memory."""
    optimizer.zero_grad(set_to_none=False)
    for number in range(2):
        loss_of(net, inputs, targets * (number + 1)).backward()
        if not number:
            for parameter in net.parameters():
                parameter.grad.data = parameter.grad.data * 0.5
    optimizer.step()


def by_hand(net, optimizer, inputs, targets):
    """Gradients of no backward pass are written in place."""
    found = torch.autograd.grad(loss_of(net, inputs, targets), list(net.parameters()))
    optimizer.zero_grad(set_to_none=False)
    for parameter, gradient in zip(net.parameters(), found, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)
    optimizer.step()


def by_hand_without_clearing(net, optimizer, inputs, targets):
    """The same, each step writing over what the last one has left."""
    found = torch.autograd.grad(loss_of(net, inputs, targets), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), found, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(gradient)
    optimizer.step()


def by_hand_into_new_memory(net, optimizer, inputs, targets):
    """The same by ``.grad.data``."""
    found = torch.autograd.grad(loss_of(net, inputs, targets), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), found, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.data = gradient
    optimizer.step()


def by_hand_as_views(net, optimizer, inputs, targets):
    """Each step's gradients are views of a new buffer, which the script changes after they are averaged."""
    parameters = list(net.parameters())
    found = torch.autograd.grad(loss_of(net, inputs, targets), parameters)
    buffer = torch.cat([gradient.flatten() for gradient in found])
    for parameter, part in zip(parameters, buffer.split([*map(torch.numel, parameters)]), strict=True):
        parameter.grad = part.view_as(parameter)
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    buffer.clamp_(-0.05, 0.05)
    optimizer.step()


def by_hand_in_inference_mode(net, optimizer, inputs, targets):
    """As evolution strategies do."""
    found = torch.autograd.grad(loss_of(net, inputs, targets), list(net.parameters()))
    with torch.inference_mode():
        for parameter, gradient in zip(net.parameters(), found, strict=True):
            parameter.grad = gradient * 0.5
    optimizer.step()


def expanded(net, optimizer, inputs, targets):
    """One number for all of a gradient, whose elements share its memory."""
    optimizer.zero_grad()
    found = torch.autograd.grad(loss_of(net, inputs, targets), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), found, strict=True):
        parameter.grad = gradient.mean().expand_as(parameter)
    optimizer.step()


STEPS = [
    one_buffer,
    a_list,
    arrays,
    by_data,
    by_hand,
    by_hand_without_clearing,
    by_hand_into_new_memory,
    by_hand_as_views,
    by_hand_in_inference_mode,
    expanded,
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_the_script_sees_and_changes_the_gradients_that_are_used(step, settings):
    same(together(2, step=step, settings=settings), alone(2, step=step))


@pytest.mark.parametrize(
    "compression", [cd.Compression.fp16, cd.Compression.powersgd(rank=4)], ids=["fp16", "powersgd"]
)
@pytest.mark.parametrize("step", [one_buffer, a_list, by_data])
def test_what_travels_smaller_arrives_there_too(step, compression):
    passes = 2 if step is by_data else 1
    found = together(2, step=step, compression=compression, backward_passes_per_step=passes)
    same(found, alone(2, step=step), rtol=0.05, atol=5e-3)


def test_accumulated_gradients_get_other_memory():
    same(together(2, step=by_data, backward_passes_per_step=2), alone(2, step=by_data))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_keep_it():
    """A penalty on the averaged gradients is differentiated through those of each rank, and averaged in its turn."""

    def step(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward(create_graph=True)
        penalty = sum(parameter.grad.square().sum() for parameter in net.parameters())
        assert penalty.requires_grad
        optimizer.zero_grad()
        (loss_of(net, 0.5 * inputs, targets) + penalty).backward()
        optimizer.step()

    same(together(2, step=step), alone(2, step=step))


def fill(net, number):
    """Writes gradients by hand, in place where there are some."""
    for value in net.values():
        if value.grad is None:
            value.grad = torch.zeros_like(value, requires_grad=False)
        value.grad.fill_(number)


@pytest.mark.parametrize("event", ["double", "join", "view"])
def test_what_is_written_by_hand_is_averaged_though_memory_changes(event):
    """The buckets, or their memory, are others when the next step begins."""

    def body(rank, count=2):
        net = weights({"a": 3, "b": 5}, dtype=torch.float32)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if count == 2:
            optimizer = cd.DistributedOptimizer(optimizer, net.named_parameters())
        kept = None
        for number in range(6):
            if number == 3 and event == "double":
                net.double()
            if number == 3 and event == "join" and count == 2:
                optimizer.join()
            if number == 3 and event == "view":
                kept, net["a"].grad = net["a"].grad.view(-1), None
            fill(net, number + (1.5 if count == 1 else rank + 1.0))
            optimizer.step()
        assert (kept is not None) == (event == "view")
        return [value.detach().double() for value in net.values()]

    first, second = each_rank(2, body)
    torch.testing.assert_close(first, body(0, count=1), rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("clips", [False, True])
def test_a_gradient_that_no_rank_has_made_anew_is_not_added_up_again(clips):
    """A head that is not used any more, whose gradient the script has left."""

    def body(rank, count=2):
        net = weights({"body": 3, "head": 2})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        if count == 2:
            optimizer = cd.DistributedOptimizer(optimizer, net.named_parameters(), op=cd.Sum)
        for number in range(7):
            net["body"].grad = None
            if number < 3:
                net["head"].grad = None
            for each in range(2) if count == 1 else [rank]:
                value = (net["body"] * (each + 1.0)).square().sum()
                if number < 3:
                    value = value + (net["head"] * (each + 1.0)).square().sum()
                value.backward()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        return [value.detach().clone() for value in net.values()]

    wanted = body(0, count=1)
    first, second = each_rank(2, body)
    torch.testing.assert_close(first, wanted)
    assert all(map(torch.equal, first, second))


def test_large_gradients_may_be_views_too():
    def body(rank):
        net = weights({"a": 3, "b": LARGE})
        optimizer = wrapped(net)
        settled(net, optimizer)
        buffer = torch.zeros(LARGE, dtype=torch.float64)
        net["b"].grad = buffer[:]
        for _ in range(3):
            buffer.zero_()
            sum(value.sum() * (rank + 1) for value in net.values()).backward()
            assert net["b"].grad.data_ptr() == buffer.data_ptr()
            optimizer.step()
        return buffer[0].item()

    assert each_rank(2, body) == [1.5] * 2


def test_a_rank_without_a_fresh_gradient_gets_that_of_others_where_its_own_lies():
    def body(rank):
        net = weights({"a": 3, "b": 5})
        optimizer = wrapped(net)
        settled(net, optimizer)
        optimizer.zero_grad()
        buffer = torch.zeros(5, dtype=torch.float64)
        net["b"].grad = buffer[:]
        (net["a"].sum() + (net["b"].sum() * 4 if rank else 0)).backward()
        return buffer.tolist()

    assert each_rank(2, body) == [[2.0] * 5] * 2


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("size", [3, LARGE])
def test_one_rank_alone_may_move_the_memory_of_a_gradient(size, to_none):
    def body(rank):
        net, seen = weights({"a": size, "b": 2}), []
        optimizer = wrapped(net)
        for step in range(7):
            if step in {2, 4} and not rank:
                net["a"].grad.data = net["a"].grad.clone()
            if step == 5 and rank:
                net["b"].grad.share_memory_()
            optimizer.zero_grad(set_to_none=to_none)
            if step == 6:
                with optimizer.no_sync():
                    (net["a"].sum() * 0 + net["b"].sum() * 0).backward()
                net["b"].grad.share_memory_()
            (sum(value.sum() for value in net.values()) * (rank + 1)).backward()
            seen.append({value for name in "ab" for value in net[name].grad.tolist()})
            optimizer.step()
        return seen, [net[name][-1].item() for name in "ab"]

    assert each_rank(2, body) == [([{1.5}] * 7, [1 - 7 * 1.5] * 2)] * 2


@pytest.mark.parametrize("again", ["in the next step", "in this step"])
@pytest.mark.parametrize("size", [3, LARGE])
def test_what_is_kept_of_a_gradient_stays_when_that_gets_other_memory(size, again):
    """In the bucket two changes cancel out then: one view more, and a gradient less."""

    def body(rank):
        net, seen = weights({"a": size, "b": 2}), []
        optimizer = wrapped(net)
        for step in range(1, 5):
            optimizer.zero_grad(set_to_none=False)
            (sum(value.sum() for value in net.values()) * (rank + step)).backward()
            kept = net["a"].grad.detach()
            net["a"].grad.data = net["a"].grad * 2.0
            if again == "in the next step":
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            (sum(value.sum() for value in net.values()) * rank).backward()
            seen.append((kept[0].item(), net["a"].grad[0].item()))
            optimizer.step()
        return seen

    means = [step + 0.5 for step in range(1, 5)]
    wanted = [(mean, 0.5 + (2 * mean if again == "in this step" else 0)) for mean in means]
    assert each_rank(2, body) == [wanted] * 2


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_gradient_may_be_that_of_another_parameter_too(size):
    """A3C's workers compute gradients of a local model, which are those of a model that is common to all."""

    def body(rank):
        local, common = weights({"a": size, "b": 2}), weights({"a": size, "b": 2})
        optimizer = wrapped(common)
        for _step in range(5):
            local.load_state_dict(common.state_dict())
            local.zero_grad(set_to_none=False)
            (sum((value**2).sum() for value in local.values()) * (rank + 1) / 20).backward()
            for mine, shared in zip(local.values(), common.values(), strict=True):
                if shared.grad is None:
                    shared.grad = mine.grad
            optimizer.step()
        return [value[0].item() for value in common.values()]

    assert each_rank(2, body) == [pytest.approx([0.85**5] * 2)] * 2


def test_gradients_are_referenced_by_what_the_script_holds():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]

    def found(*, by_hand=False):
        return are_referenced(tuple([parameter.grad for parameter in parameters]), by_hand=by_hand)

    for parameter in parameters:
        (parameter * torch.ones(2)).sum().backward()
    assert found() is None
    held = parameters[1].grad
    array = parameters[2].grad.numpy()
    assert found() == [False, True, False, False]  # no array can share what backward has just made
    assert found(by_hand=True) == [False, True, True, False]
    parameters[2].sum().backward()
    parameters[3].sum().backward()
    assert found() == [False, True, True, False]
    del held, array
    assert found() == [False] * 4
    other = nn.Parameter(torch.ones(2))
    other.grad = parameters[1].grad
    assert found() == [False, True, False, False]
