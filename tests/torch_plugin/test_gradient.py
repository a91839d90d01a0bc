"""One gradient's way through a step: memory that is shared, gradients set by hand, steps that are given up."""

from __future__ import annotations

import _thread
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import coordd.torch as cd
from coordd_torch.gradient import nested
from tests.local_ranks import each_rank, local_ranks
from tests.torch_plugin.training import STEPS, alone, batch, model, same, together, trained

mse = nn.functional.mse_loss


def wrapped(parameters, **options):
    return cd.DistributedOptimizer(torch.optim.SGD(list(parameters), lr=1.0), **options)


@pytest.mark.parametrize("compression", [cd.Compression.none, cd.Compression.bf16])
def test_memory_that_autograd_still_reads_is_not_written_to(compression):
    """The gradient of a bias is a view of the one from which autograd goes on to compute that of the weight."""

    def body(rank):
        weight, bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4, 4))
        optimizer = wrapped([weight, bias], compression=compression)
        shared, found = [], []

        def reduced_by_now(gradient):
            shared.append(bias.grad.data_ptr() == gradient.data_ptr())
            optimizer._coordd.underway.wait()

        for _ in range(2):
            optimizer.zero_grad()
            hidden = torch.full((4, 4), 2.0**rank) @ weight
            hidden.register_hook(reduced_by_now)
            ((hidden.unsqueeze(0) + bias.unsqueeze(0)) * (3 * rank + 1)).sum().backward()
            found.append((weight.grad[0, 0].item(), bias.grad[0, 0].item()))
        return shared[0], found

    assert each_rank(2, body) == [(True, [(4 * (1 * 1 + 2 * 4) / 2, (1 + 4) / 2)] * 2)] * 2


def test_what_shares_memory_with_a_gradient_keeps_its_values():
    def body(rank):
        parameter, other = (nn.Parameter(torch.zeros(4)) for _ in range(2))
        optimizer = wrapped([parameter])
        seen = []
        parameter.register_post_accumulate_grad_hook(lambda made: seen.append(made.grad.data_ptr()))
        other.register_post_accumulate_grad_hook(lambda made: seen.append(made.grad.data_ptr()))
        ((other.unsqueeze(0) + parameter.unsqueeze(0)) * (rank + 1)).sum().backward()
        assert seen[0] == seen[1]
        optimizer.step()
        return parameter.grad.tolist(), other.grad.tolist()

    assert each_rank(2, body) == [([1.5] * 4, [rank + 1.0] * 4) for rank in range(2)]


def test_the_gradient_stays_the_object_that_it_is():
    def body(rank):
        parameter = nn.Parameter(torch.zeros(3))
        seen = []
        parameter.register_post_accumulate_grad_hook(lambda made: seen.append(made.grad))
        optimizer = wrapped([parameter])
        (parameter * rank).sum().backward()
        assert parameter.grad is seen[0]
        optimizer.step()
        return seen[0].tolist()

    assert each_rank(2, body) == [[0.5] * 3] * 2


def by_hand(net, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = mse(net(inputs), targets)
    for parameter, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("compression", [cd.Compression.none, cd.Compression.fp16])
def test_gradients_that_are_set_by_hand_are_averaged(compression):
    tolerance = {} if compression is cd.Compression.none else {"atol": 0.02, "rtol": 0.02}
    same(together(3, step=by_hand, compression=compression), alone(3, step=by_hand), **tolerance)


def test_some_gradients_may_be_set_by_hand_and_on_one_rank_only():
    def body(rank):
        one, two = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = wrapped([one, two])
        for step in range(3):
            optimizer.zero_grad()
            (one * (rank + 1)).sum().backward()
            if step == rank:
                two.grad = torch.full((2,), 4.0 * (rank + 1))
            optimizer.step()
        return one.tolist(), two.tolist()

    assert each_rank(2, body) == [([-4.5] * 2, [-6.0] * 2)] * 2


def test_gradients_of_an_earlier_step_are_used_again_as_they_are():
    """With a sum it shows: what was reduced once is not reduced again."""

    def body(rank):
        one, two = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = wrapped([one, two], op=cd.Sum)
        (one * 2 + two * (rank + 1)).sum().backward()
        for _ in range(3):
            optimizer.step()
        one.grad = None
        one.sum().backward()
        optimizer.step()
        optimizer.step()
        return one.tolist(), two.tolist()

    assert each_rank(2, body) == [([-16.0] * 2, [-15.0] * 2)] * 2


def test_gradients_that_were_there_before_do_not_count_as_passes():
    def body(rank):
        net = model()
        mse(net(batch(rank, 9)[0]), batch(rank, 9)[1]).backward()
        net.zero_grad(set_to_none=False)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        inputs, targets = batch(rank, 0)
        mse(net(inputs), targets).backward()
        optimizer.step()
        return trained(net, optimizer, [batch(rank, number) for number in range(1, STEPS)])

    same(each_rank(2, body), alone(2))


def skipping(clear):
    """A step that a loss scaler skips, on all ranks alike, before one that it makes."""

    def step(net, optimizer, inputs, targets):
        (mse(net(inputs), targets) * float("inf")).backward()
        assert not net[0].weight.grad.isfinite().all()
        clear(net, optimizer)
        mse(net(inputs), targets).backward()
        optimizer.step()
        clear(net, optimizer)

    return step


CLEAR = {
    "model": lambda net, _: net.zero_grad(),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "in place": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", CLEAR)
def test_a_step_may_be_given_up_by_clearing_its_gradients(how):
    same(together(2, step=skipping(CLEAR[how])), alone(2))


def test_passes_that_are_given_up_do_not_count():
    def step(net, optimizer, inputs, targets):
        (10 * mse(net(inputs), targets)).backward()
        net.zero_grad()
        for _ in range(2):
            (mse(net(inputs), targets) / 2).backward()
        optimizer.step()
        net.zero_grad()

    same(together(2, step=step, backward_passes_per_step=2), alone(2))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_generators_pass_through_its_critic_is_forgotten_with_the_critics_gradients(passes):
    def train(batches, wrap):
        critic, generator = model(), nn.Linear(5, 5).double()
        with torch.no_grad():
            generator.weight.fill_(0.1), generator.bias.fill_(0.2)
        first = wrap(torch.optim.SGD(critic.parameters(), lr=0.05), backward_passes_per_step=passes)
        second = wrap(torch.optim.SGD(generator.parameters(), lr=0.05))
        for inputs, targets in batches:
            critic.zero_grad()
            made = generator(inputs)
            losses = mse(critic(inputs), targets), critic(made.detach()).mean()
            for loss in losses if passes == 2 else [sum(losses)]:
                loss.backward()
            first.step()
            generator.zero_grad()
            (-critic(made).mean()).backward()
            second.step()
        return {**critic.state_dict(), **{f"generator.{name}": each for name, each in generator.state_dict().items()}}

    def body(rank):
        return train([batch(rank, number) for number in range(STEPS)], cd.DistributedOptimizer)

    joined = [
        tuple(torch.cat(pair) for pair in zip(batch(0, number), batch(1, number), strict=True))
        for number in range(STEPS)
    ]
    same(each_rank(2, body), train(joined, lambda optimizer, **_: optimizer))


@pytest.mark.parametrize("how", CLEAR)
def test_a_step_that_one_rank_gives_up_is_made_by_the_others(how):
    """A parameter that nobody uses makes the others ask once more when they step."""

    def body(rank):
        used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
        optimizer = wrapped([used, unused])
        for step in range(4):
            CLEAR[how](nn.ParameterList([used, unused]), optimizer)
            (used * (rank + 1)).sum().backward()
            if step % 2 == 0 or rank == 0:
                optimizer.step()
        optimizer.zero_grad()
        return used.tolist(), unused.grad

    assert each_rank(2, body) == [([-6.0] * 2, None), ([-3.0] * 2, None)]


def test_lazily_conjugated_and_negated_gradients_are_reduced():
    def body(rank):
        weight, other = (nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)) for _ in range(2))
        seen = []
        for each in (weight, other):
            each.register_post_accumulate_grad_hook(lambda made: seen.append(made.grad.is_conj()))
        optimizer = wrapped([weight, other])
        for _ in range(2):
            optimizer.zero_grad()
            inputs = torch.full((2, 2), (rank + 1) * (1 + 2j))
            ((inputs @ weight.mH) + other).real.sum().backward()
            found = weight.grad[0, 0].item(), other.grad[0, 0].item()
        assert any(seen), "this version of PyTorch has no such gradients: the test shows nothing"
        return found

    assert each_rank(2, body) == [((3 + 6j), (1 + 0j))] * 2


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_a_layer_in_two_reentrant_checkpoints_is_refused_with_a_way_out(outside):
    def body(rank):
        net = model()
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        for reentrant in (True, False):
            optimizer.zero_grad()
            hidden = batch(rank, 0)[0].requires_grad_()
            for _ in range(2):
                hidden = checkpoint(lambda value: net[0](value)[:, :5], hidden, use_reentrant=reentrant)
            if outside:
                hidden = net[0](batch(rank, 0)[0])[:, :5]
                hidden = checkpoint(lambda value: net[0](value)[:, :5], hidden, use_reentrant=reentrant)
            if reentrant:
                with pytest.raises(cd.CoorddError, match=r"several reentrant checkpoints .* use_reentrant=False"):
                    net(hidden).sum().backward()
            else:
                net(hidden).sum().backward()
                optimizer.step()
        return net.state_dict()

    with local_ranks(2) as ranks:
        same(ranks.each(body))


@pytest.mark.parametrize("inside", [False, True])
def test_a_pass_is_nested_also_on_a_thread_of_an_accelerator(inside):
    """The stack of such a thread begins with the Python backward that runs the pass."""
    found, done = [], threading.Event()
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(lambda _: found.append(nested()))

    def run(*_):
        (parameter * 2).sum().backward()
        done.set()

    class Checkpoint(torch.autograd.Function):
        forward = staticmethod(lambda _, x: x)
        backward = staticmethod(run)

    if inside:
        context = torch.ones(1, requires_grad=True)
        _thread.start_new_thread(Checkpoint.apply(context).grad_fn.apply, (torch.ones(1),))
    else:
        _thread.start_new_thread(run, ())
    assert done.wait(20)
    assert found == [inside]
