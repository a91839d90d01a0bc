"""`DistributedOptimizer`: the same weights as one process that has the whole batch, however the loop is written."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.training import ROWS, STEPS, alone, batch, model, same, together, trained

mse = nn.functional.mse_loss


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", [{}, {"fusion_mb": 0.0, "cycle_ms": 0.0}, {"cache_capacity": 0}])
def test_ranks_train_as_one_process_would(count, settings):
    same(together(count, settings=settings), alone(count))


def test_the_sum_is_what_it_says():
    def step(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        (mse(net(inputs), targets) * (len(inputs) / ROWS)).backward()
        optimizer.step()

    same(together(3, op=cd.Sum), alone(3, step=step))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop])
def test_any_optimizer_can_be_wrapped(make):
    def optimizer(net):
        return make(net.parameters(), lr=0.01)

    same(together(2, make=optimizer), alone(2, make=optimizer))


def test_several_passes_are_summed_before_they_are_averaged():
    def halves(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        middle = len(inputs) // 2
        for part in (slice(0, middle), slice(middle, None)):
            (mse(net(inputs[part]), targets[part]) / 2).backward()
        optimizer.step()

    same(together(2, step=halves, backward_passes_per_step=2), alone(2))


def test_the_number_of_passes_can_be_changed():
    def body(rank):
        net = model()
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        for passes in (1, 3, 2):
            optimizer.set_backward_passes_per_step(passes)
            optimizer.zero_grad()
            for number in range(passes):
                mse(net(batch(rank, number)[0]), batch(rank, number)[1]).backward()
            optimizer.step()
        with pytest.raises(cd.ArgumentError, match="backward_passes_per_step must be > 0, not 0"):
            optimizer.set_backward_passes_per_step(0)
        return net.state_dict()

    same(each_rank(2, body))


def clipped(net, optimizer, inputs, targets):
    optimizer.zero_grad()
    (10 * mse(net(inputs), targets)).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    assert norm > 0.5
    optimizer.step()


def clipped_as_in_horovod(net, optimizer, inputs, targets):
    optimizer.zero_grad()
    (10 * mse(net(inputs), targets)).backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("step", [clipped, clipped_as_in_horovod])
def test_gradients_can_be_clipped_right_after_backward(step):
    same(together(3, step=step), alone(3, step=clipped))


def test_gradients_are_averaged_when_backward_returns():
    def body(rank):
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        (parameter * (rank + 1)).sum().backward()
        found = parameter.grad.tolist()
        optimizer.step()
        return found, parameter.tolist()

    assert each_rank(3, body) == [([2.0] * 3, [-2.0] * 3)] * 3


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", ["optimizer", "model"])
def test_gradients_can_be_cleared_in_any_way(set_to_none, who):
    def step(net, optimizer, inputs, targets):
        mse(net(inputs), targets).backward()
        optimizer.step()
        (optimizer if who == "optimizer" else net).zero_grad(set_to_none=set_to_none)

    same(together(2, step=step), alone(2))


def test_gradients_cleared_between_backward_and_step_are_gone():
    def step(net, optimizer, inputs, targets):
        mse(net(inputs), targets).backward()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in net.parameters())
        optimizer.step()

    same(together(2, step=step), model().state_dict())


@pytest.mark.parametrize("early", [True, False])
def test_schedulers_made_before_and_after_wrapping_work(early):
    def body(rank):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        if early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        wrapped = cd.DistributedOptimizer(optimizer, net.named_parameters())
        assert wrapped is optimizer
        if not early:
            scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 2, gamma=0.1)
        rates = []
        for number in range(STEPS):
            wrapped.zero_grad()
            mse(net(batch(rank, number)[0]), batch(rank, number)[1]).backward()
            wrapped.step()
            rates.append(round(wrapped.param_groups[0]["lr"], 6))
            scheduler.step()  # warns if it has not seen the optimizer's step
        return rates, net.state_dict()

    results = each_rank(2, body)
    assert [rates for rates, _ in results] == [[1.0, 1.0, 0.1, 0.1]] * 2
    same([weights for _, weights in results])


def test_it_is_still_an_optimizer_of_its_class():
    def body(rank):
        net = model()
        optimizer = cd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        with pytest.raises(cd.ArgumentError, match="wrap it once"):
            cd.DistributedOptimizer(optimizer)

    each_rank(2, body)


def test_parameters_have_one_optimizer_the_last():
    def body(rank):
        net = model()
        first, second = (
            cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=cd.Sum)
            for _ in range(2)
        )
        net(batch(rank, 0)[0]).sum().backward()
        for use in (first.step, first.synchronize):
            with pytest.raises(cd.ArgumentError, match="another DistributedOptimizer was made for parameters of this"):
                use()
        second.step()
        return net.state_dict()

    def step(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        net(inputs).sum().backward()
        optimizer.step()

    expected = model()
    step(expected, torch.optim.SGD(expected.parameters(), lr=0.1), torch.cat([batch(0, 0)[0], batch(1, 0)[0]]), None)
    same(each_rank(2, body), expected.state_dict())


def test_an_optimizer_may_be_made_anew_in_the_midst_of_training():
    def body(rank):
        net = model()
        for number in range(STEPS):
            optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
            trained(net, optimizer, [batch(rank, number)])
        return net.state_dict()

    same(each_rank(2, body), alone(2, make=lambda net: torch.optim.SGD(net.parameters(), lr=0.1)))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301
def test_a_copy_is_the_plain_optimizer(count, duplicate, caplog):
    def body(rank):
        net = model()
        optimizer = cd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.1), net.named_parameters())
        trained(net, optimizer, [batch(rank, 0)])
        copied = duplicate(optimizer)
        assert type(copied) is torch.optim.Adam
        states = [one.state_dict()["state"][0]["exp_avg"] for one in (optimizer, copied)]
        assert torch.equal(*states)
        parameter = copied.param_groups[0]["params"][0]
        parameter.grad = torch.ones_like(parameter)
        before = parameter.detach().clone()
        copied.step()
        copied.zero_grad()
        assert not torch.equal(parameter, before)
        return trained(net, optimizer, [batch(rank, 1)])

    same(each_rank(count, body))
    assert ("is the plain Adam, which reduces nothing" in caplog.text) == (count == 2)


def test_a_step_as_it_is_waits_for_what_is_under_way():
    """Else the next step would write to memory that is still being reduced."""
    waits = threading.Event()

    def body(rank):
        one, two = (nn.Parameter(torch.zeros(1 << 15)) for _ in range(2))
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([one, two], lr=1.0), [("one", one), ("two", two)])
        underway = optimizer._coordd.underway

        def wait(original=underway.wait):
            waits.set()
            original()

        def fail(_):
            raise ValueError("not today")

        if rank == 0:
            underway.wait = wait
        else:
            assert waits.wait(10)
        two.register_hook(fail)
        with pytest.raises(ValueError, match="not today"):
            (one * (two * 2)).sum().backward()
        with optimizer.skip_synchronize():
            optimizer.step()
        landed = underway._landed, underway._started
        waits.set()
        return landed

    # The gradient of the other parameter is given up, so it takes part with nothing, for the sake of other ranks.
    assert each_rank(2, body) == [(2, 2)] * 2


def test_a_step_that_is_skipped_as_a_scaler_does_is_forgotten():
    """On every rank alike, for the gradients are averaged before anybody looks for infinities."""

    def step(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        loss = mse(net(inputs), targets)
        (loss * float("inf") if inputs[0, 0] > 0 else loss).backward()
        if all(parameter.grad.isfinite().all() for parameter in net.parameters()):
            optimizer.step()

    same(together(3, step=step))


@pytest.mark.parametrize("compression", [cd.Compression.fp16, cd.Compression.bf16])
def test_compression_costs_precision_only(compression):
    same(together(2, compression=compression), alone(2), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_predividing_changes_nothing_but_the_rounding(factor):
    same(together(4, gradient_predivide_factor=factor), alone(4))


def test_a_process_set_trains_without_the_others():
    pair = cd.ProcessSet([0, 2])

    def body(rank):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = cd.DistributedOptimizer(optimizer, net.named_parameters(), process_set=pair)
        mine = {0: 0, 1: 7, 2: 1}[rank]
        return trained(net, optimizer, [batch(mine, number) for number in range(STEPS)])

    first, lonely, third = each_rank(3, body)
    same([first, third], alone(2))
    with pytest.raises(AssertionError, match="differs"):
        same([first, lonely])


def test_runs_are_bitwise_equal():
    first, second = together(3), together(3)
    same([*first, *second])


def test_state_can_be_saved_and_loaded():
    def body(rank):
        net = model()
        optimizer = cd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
        start = [batch(rank, number) for number in range(2)]
        trained(net, optimizer, start)
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        kept = copy.deepcopy(optimizer.state_dict())
        trained(net, optimizer, start)
        file.seek(0)
        saved = torch.load(file)
        other = model()
        fresh = cd.DistributedOptimizer(torch.optim.Adam(other.parameters()), other.named_parameters())
        for target, source in ((optimizer, kept), (fresh, saved["optimizer"])):
            target.load_state_dict(source)
        net.load_state_dict(saved["net"])
        other.load_state_dict(saved["net"])
        return trained(net, optimizer, start), trained(other, fresh, start)

    same(list(itertools.chain.from_iterable(each_rank(2, body))))


def test_loading_and_clearing_forget_what_was_computed():
    def step(net, optimizer, inputs, targets):
        state = optimizer.state_dict()
        mse(net(inputs), targets).backward()
        optimizer.load_state_dict(state)
        net.zero_grad()
        mse(net(inputs), targets).backward()
        optimizer.step()
        net.zero_grad()

    same(together(2, step=step), alone(2))


BAD = {
    "named_parameters should be a sequence of tuples": {"named_parameters": lambda net: list(net.parameters())},
    "must be unique. Found duplicates: w": {"named_parameters": lambda net: [("w", each) for each in net.parameters()]},
    "one or more model parameters were not named: param.0.5": {
        "named_parameters": lambda net: list(net.named_parameters())[:-1]
    },
    "backward_passes_per_step must be > 0, not -1": {"backward_passes_per_step": -1},
    "gradient_predivide_factor not supported with op != Average": {"gradient_predivide_factor": 2.0, "op": cd.Sum},
}


@pytest.mark.parametrize("text", BAD)
def test_bad_choices_are_refused(text):
    def body(rank):
        net = model()
        options = {name: value(net) if callable(value) else value for name, value in BAD[text].items()}
        with pytest.raises(ValueError, match=text):
            cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)

    each_rank(2, body)


@pytest.mark.parametrize("op", [cd.Average, cd.Sum, cd.Adasum])
def test_operations_may_be_given_by_horovods_numbers(op):
    same([*together(2, op=op), *together(2, op=int(op))])


def test_without_init_it_says_so():
    with pytest.raises(cd.NotInitializedError, match=r"use hvd\.init\(\)"):
        cd.DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1))


def test_an_optimizer_of_other_ranks_only_is_counted_as_well():
    def body(rank):
        first, second = nn.Linear(2, 1), nn.Linear(2, 1)
        cd.broadcast_parameters(second.state_dict())
        some = cd.ProcessSet([1, 2])
        cd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=1.0), first.named_parameters(), process_set=some)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=1.0), second.named_parameters())
        second(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
        return second.weight.grad.tolist()

    assert each_rank(3, body) == [[[1.0, 1.0]]] * 3
