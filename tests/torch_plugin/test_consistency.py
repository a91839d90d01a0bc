"""Ranks whose parameters or hyperparameters part after the first step are told, and training is not disturbed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd import api
from tests.local_ranks import each_rank
from tests.torch_plugin.test_discarded import Failing
from tests.torch_plugin.test_start import distributed, net


def step(model, optimizer, before=lambda: None):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    before()
    optimizer.step()


def clipped(rank, model, optimizer, number):
    step(model, optimizer, lambda: rank or nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def scheduled(rank, model, optimizer, number):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank * (number >= 4))
    step(model, optimizer)


def skipped(rank, model, optimizer, number):
    if (number, rank) == (3, 1):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
    else:
        step(model, optimizer)


def loaded(rank, model, optimizer, number):
    if (number, rank) == (3, 1):
        model.load_state_dict(net(seed=5).state_dict())
    step(model, optimizer)


FAULTS = {"clipped": clipped, "scheduled": scheduled, "skipped": skipped, "loaded": loaded}


CASES = [*((fault, cd.Average) for fault in FAULTS), ("scheduled", cd.Adasum), ("loaded", cd.Adasum)]
"""Adasum combines steps that differ."""


@pytest.mark.parametrize(("fault", "op"), CASES)
def test_ranks_that_part_are_told_alike(fault, op):
    def body(rank):
        model = net()
        optimizer = distributed(model, op=op)
        number = 0
        with pytest.raises(cd.MismatchError, match=r"no longer have the same values of .*on rank 1") as caught:  # noqa: PT012
            for number in range(12):
                FAULTS[fault](rank, model, optimizer, number)
        return str(caught.value), number

    first, second = each_rank(2, body)
    assert first == second
    assert ("lr of parameter group 0" in first[0]) == (fault == "scheduled")


def test_the_rank_that_differs_is_named():
    def body(rank):
        model = net()
        optimizer = distributed(model)
        with pytest.raises(cd.MismatchError, match=r"lr of parameter group 0 \(0.1 on ranks 0, 2; 0.3 on rank 1\)"):  # noqa: PT012
            for number in range(4):
                optimizer.param_groups[0]["lr"] = 0.3 if number and rank == 1 else 0.1
                step(model, optimizer)

    each_rank(3, body)


def test_what_may_differ_on_purpose_is_not_compared():
    def body(rank):
        model = net()
        optimizer = distributed(model)
        for number in range(10):
            optimizer.zero_grad()
            with optimizer.no_sync() if number == 3 else optimizer.skip_synchronize():
                model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            if number == 3:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    def allowed(rank):
        model = net()
        optimizer = distributed(model)
        for number in range(10):
            loaded(rank, model, optimizer, number)

    each_rank(2, body)
    each_rank(2, allowed, check_parameters=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_what_rounding_changes_is_no_difference(dtype):
    def body(rank):
        values = nn.ParameterList([torch.full((30, 3), 1.0 + place).to(dtype) for place in range(20)])
        optimizer = distributed(values)
        for number in range(9):
            optimizer.zero_grad()
            sum(value.abs().sum() for value in values).backward()
            optimizer.step()
            with torch.no_grad():
                for value in values:
                    value.mul_(1 + rank * (-1) ** number * torch.finfo(dtype).eps)
        return True

    assert each_rank(2, body) == [True] * 2


def test_a_locked_plan_goes_on():
    """Values are compared beside it, without making or ending a lock."""

    def body(_):
        model = net(depth=3)
        optimizer = distributed(model)
        daemon = api.operations().daemon
        locks = set()
        for number in range(300):
            step(model, optimizer)
            if number > 20:
                lock = daemon._loop._member.lock
                locks.add(lock and lock.number)
        return locks, optimizer._coordd.consistency.steps

    for locks, steps in each_rank(2, body):
        assert len(locks) == 1
        assert None not in locks
        assert steps == 300


def test_frozen_parameters_are_compared_at_the_start():
    def structure(rank):
        model = net(depth=2)
        model[1].requires_grad_(requires_grad=False)
        model[1].weight = nn.Parameter(torch.ones(2, 2 + rank), requires_grad=False)
        with pytest.raises(cd.MismatchError, match=r"1\.weight \(2, 2\) float32 frozen on rank 0 only"):
            cd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model.named_parameters())

    def values(rank):
        model = net(depth=2)
        model[1].requires_grad_(requires_grad=False)
        with torch.no_grad():
            model[1].weight += rank
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model.named_parameters())
        with pytest.raises(cd.MismatchError, match=r"start with different values of 1\.weight"):
            step(model, optimizer)

    each_rank(2, structure)
    each_rank(2, values)


def test_a_step_that_is_discarded_while_the_ranks_start_with_different_values_lets_none_wait():
    def body(rank):
        model = net(seed=rank)
        optimizer = distributed(model)
        found = []
        for number in range(2):
            optimizer.zero_grad()
            hidden = model[0].weight.sum() + model(torch.ones(1, 2)).sum()
            rows = model(torch.ones(1, 2, requires_grad=True))
            loss = (Failing.apply(rows).sum() if (number, rank) == (0, 1) else rows.sum()) + hidden
            try:
                loss.backward()
            except (MemoryError, cd.DiscardedStepError, cd.MismatchError) as error:
                found.append(type(error))
                if not isinstance(error, cd.MismatchError):
                    optimizer.discard_step()
        return found

    first, second = each_rank(2, body)
    assert first == [cd.DiscardedStepError, cd.MismatchError]
    assert second == [MemoryError, cd.MismatchError]


def test_a_step_inside_a_backward_pass_is_refused_in_a_sentence():
    def body(_):
        model = net()
        optimizer = distributed(model)
        for value in model.parameters():
            value.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(cd.CoorddError, match=r"step\(\) was called inside a backward pass"):
            model(torch.ones(1, 2)).sum().backward()

    each_rank(2, body)
