"""Ranks that wait for each other, one of them for gradients: all are told, and steps pair rightly afterwards."""

from __future__ import annotations

import copy
import time

import pytest
import torch

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.test_compressed_bucket import MAKERS
from tests.torch_plugin.test_discarded import loss_of
from tests.torch_plugin.training import LARGE, attempts, same, weights

WAYS = [{}, {"simulate_hosts": 2, "fusion_mb": 0.1}, {"lock_steps": 2, "fusion_mb": 0.1}, {"overlap": False}]


def other_optimizer():
    cd.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))


ELSEWHERE = {
    "barrier": cd.barrier,
    "allreduce": lambda: cd.allreduce(torch.ones(1), name="metric"),
    "optimizer": other_optimizer,
}
SIZES = {"a": 3, "b": LARGE, "c": 2, "d": LARGE}
STEPS = 6


def factor_of(rank, number):
    return 1.0 + rank + 3 * number


def train(rank, count, fails, elsewhere, *, slow=0.0, retries=False, **options):
    """Makes steps; before one of them the last rank does something else. Returns what it has heard, and values."""
    net = weights(SIZES)
    optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), **options)
    made, heard = [], []
    for number in range(STEPS):
        if number == fails and 0 < rank < count - 1:
            time.sleep(slow)
        if number == fails and rank == count - 1:
            began = time.monotonic()
            with pytest.raises(cd.MismatchError, match=r"ranks wait for each other.*not submitted by rank"):
                elsewhere()
            assert time.monotonic() - began < 5.0
        try:
            optimizer.zero_grad()
            loss_of(net, factor_of(rank, number)).backward()
        except (cd.DiscardedStepError, cd.MismatchError) as error:
            assert all(parameter.grad is None for parameter in net.parameters())
            heard.append(type(error).__name__)
            if retries and rank == 0:
                with pytest.raises(cd.DiscardedStepError):
                    optimizer.step()
            optimizer.discard_step()
            continue
        optimizer.step()
        made.append(number)
    return made, heard, net.state_dict()


def reference(count, numbers):
    net = weights(SIZES)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for number in numbers:
        optimizer.zero_grad()
        loss_of(net, sum(factor_of(rank, number) for rank in range(count)) / count).backward()
        optimizer.step()
    return net.state_dict()


def check(results, fails, *, rounded=False):
    made = [number for number in range(STEPS) if number != fails]
    assert [each[0] for each in results] == [made] * len(results)
    assert results[0][1] == ["MismatchError"]
    assert results[-1][1] == ["DiscardedStepError"]
    same([values for _, _, values in results], None if rounded else reference(len(results), made))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("fails", [0, 1, 4])
def test_a_rank_with_one_batch_more_is_told_and_the_step_discarded(way, fails):
    check(each_rank(2, lambda rank: train(rank, 2, fails, ELSEWHERE["barrier"], retries=True), **way), fails)


@pytest.mark.parametrize("elsewhere", ELSEWHERE.values(), ids=ELSEWHERE)
def test_whatever_the_other_rank_waits_for(elsewhere):
    check(each_rank(2, lambda rank: train(rank, 2, 2, elsewhere), fusion_mb=0.1), 2)


@pytest.mark.parametrize("slow", [0.0, 3.0])
@pytest.mark.parametrize("fails", [0, 4])
def test_a_rank_that_has_no_part_in_it_discards_the_step_too(slow, fails):
    results = each_rank(3, lambda rank: train(rank, 3, fails, cd.barrier, slow=slow), fusion_mb=0.1)
    check(results, fails)


@pytest.mark.parametrize("maker", MAKERS)
def test_gradients_that_travel_small(maker):
    check(each_rank(2, lambda rank: train(rank, 2, 3, cd.barrier, compression=maker()), fusion_mb=0.1), 3, rounded=True)


def test_a_rank_that_only_computes_for_long_is_waited_for():
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        for number in range(3):
            if number == rank:
                time.sleep(4.0)
            optimizer.zero_grad()
            loss_of(net, 1.0 + rank).backward()
            optimizer.step()
        return net.state_dict()

    same(each_rank(2, body))


def test_a_rank_that_joins_keeps_nobody_waiting():
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        for _ in range(2 + rank):
            optimizer.zero_grad()
            loss_of(net, 1.0 + rank).backward()
            time.sleep(1.5 * rank)
            optimizer.step()
        optimizer.join()
        return net.state_dict()

    same(each_rank(2, body))


def test_a_step_that_is_discarded_while_others_are_in_a_collective_of_their_forward_pass():
    """Of a name, so that operations pair again afterwards."""

    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        heard = []
        for number in range(6):
            try:
                optimizer.zero_grad()
                _ = 1 / (rank or number - 2)
                cd.allreduce(torch.ones(1), name="z")
                loss_of(net, factor_of(rank, number)).backward()
            except (ZeroDivisionError, cd.MismatchError, cd.DiscardedStepError) as error:
                heard.append((number, type(error)))
                optimizer.discard_step()
                continue
            optimizer.step()
        return heard, net.state_dict()

    (first, values), (second, others) = each_rank(2, body)
    assert first == [(2, ZeroDivisionError)]
    assert second == [(2, cd.MismatchError)]
    same([values, others])


def test_no_gradient_of_a_pass_that_could_not_begin_is_left():
    """Its first gradient was made when the error came; the script clears gradients after steps only."""

    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        made = []
        for number in range(5):
            try:
                _ = 1 / (1 - rank or number - 2)
                with optimizer.no_sync():
                    loss_of(net, 1.0).backward()
                cd.allreduce(torch.ones(1), name="z")
                loss_of(net, 1.0).backward()
            except (ZeroDivisionError, cd.MismatchError, cd.DiscardedStepError):
                optimizer.discard_step()
                assert all(parameter.grad is None for parameter in net.parameters())
                continue
            made.append([parameter.grad.flatten()[0].item() for parameter in net.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return made, net.state_dict()

    (first, values), (second, others) = each_rank(2, body)
    assert first == second == [first[0]] * 4
    same([values, others])


def test_two_steps_in_a_row_are_discarded_while_others_are_in_a_collective_of_their_forward_pass():
    """The second call waits until the first step is discarded, and raises nothing, whatever the others were told."""

    def body(rank):
        net = weights(SIZES)

        def attempt(_, number):
            _ = 1 / (1 - rank or (number - 2) * (number - 3))
            cd.allreduce(torch.ones(1), name="z")
            loss_of(net, factor_of(rank, number)).backward()

        return attempts(net, 7, attempt, ZeroDivisionError)

    (first, values), (second, others) = each_rank(2, body)
    assert second == [(2, ZeroDivisionError), (3, ZeroDivisionError), (4, cd.MismatchError)]
    assert first == [(2, cd.MismatchError), (3, cd.DiscardedStepError), (4, cd.MismatchError)]
    same([values, others])


def test_a_rank_that_trains_a_copy_of_its_model_is_warned(caplog):
    """Its steps count as zeros in the others' averages."""

    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        trained = copy.deepcopy(net) if rank else net
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(trained, 1.0).backward()
            optimizer.step()

    each_rank(2, body)
    (told,) = [record.getMessage() for record in caplog.records if "without a backward pass" in record.getMessage()]
    assert told.startswith("this rank has made 3 steps in a row")


def test_a_rank_without_a_batch_now_and_then_is_not_warned(caplog):
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        for number in range(9):
            optimizer.zero_grad()
            if not rank or number % 3:
                loss_of(net, 1.0).backward()
            optimizer.step()

    each_rank(2, body)
    assert "without a backward pass" not in caplog.text


def test_gradients_that_a_script_sets_itself_are_no_idle_steps(caplog):
    def body(_):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        for _ in range(5):
            optimizer.zero_grad()
            found = torch.autograd.grad(loss_of(net, 1.0), list(net.parameters()))
            for parameter, gradient in zip(net.parameters(), found, strict=True):
                parameter.grad = gradient
            optimizer.step()

    each_rank(2, body)
    assert "without a backward pass" not in caplog.text
