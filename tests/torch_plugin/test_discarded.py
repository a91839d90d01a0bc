"""Backward passes that fail on one rank: the step is discarded on all ranks, and the next one pairs rightly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.test_compressed_bucket import MAKERS
from tests.torch_plugin.training import LARGE, WAYS, same, weights

MOMENTS = ["start", "middle", "end"]


class Failing(torch.autograd.Function):
    """Fails in backward, as running out of memory does."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("out of memory")


def loss_of(net: nn.ParameterDict, factor: float, failing: str = "") -> torch.Tensor:
    """Uses the parameters one after the other, so that their gradients are computed in the opposite order."""
    found = torch.zeros((), dtype=torch.float64)
    if failing == "end":
        found = Failing.apply(found.requires_grad_())
    for index, value in enumerate(net.values()):
        if failing == "middle" and index == len(net) // 2:
            found = Failing.apply(found)
        found = found + (value * (index + 1)).sum()
    return Failing.apply(found * factor) if failing == "start" else found * factor


def backward(net, factor, failing):
    loss = loss_of(net, factor, failing)
    if failing:
        with pytest.raises(MemoryError, match="out of memory"):
            loss.backward()
        return False
    try:
        loss.backward()
    except cd.DiscardedStepError:
        return False
    return True


@pytest.mark.parametrize("way", [*WAYS, {"fusion_mb": 0.1}, {"lock_steps": 2, "fusion_mb": 0.1}], ids=str)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fails", [0, 1, 6])
def test_a_backward_pass_that_fails_on_one_rank_discards_the_step_on_all(way, moment, fails):
    """Also the first step, where gradients are reduced one by one, and a later one under a locked plan.

    At its very start a pass has made no gradient, so nothing is discarded: the rank goes on with its next batch.
    """
    sizes = {"a": 3, "b": LARGE, "c": 2, "d": LARGE, "e": 1}
    steps = 8

    def body(rank):
        net = weights(sizes)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        made: list[int] = []
        for number in range(steps + 1):
            optimizer.zero_grad()
            if len(made) < steps and backward(net, rank + number, moment if number == fails and rank == 1 else ""):
                optimizer.step()
                made.append(number)
        return made, net.state_dict()

    others = [number for number in range(steps + 1) if number != fails]
    made = [list(range(steps)) if moment == "start" else others, others]
    net = weights(sizes)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for first, second in zip(*made, strict=True):
        optimizer.zero_grad()
        loss_of(net, (first + second + 1) / 2).backward()
        optimizer.step()
    found = each_rank(2, body, **way)
    assert [numbers for numbers, _ in found] == made
    same([state for _, state in found], net.state_dict())


@pytest.mark.parametrize("fails", [0, 3])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_other_ranks_hear_at_once_though_the_rank_does_something_else_first(fails, passes):
    """Such as asking all ranks whether they are well, before it clears its gradients."""

    def body(rank):
        net = weights({"a": 3, "b": LARGE})
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), backward_passes_per_step=passes
        )
        for number in range(5):
            done = True
            for part in range(passes):
                done &= backward(net, 1.0, "middle" if (number, part, rank) == (fails, passes - 1, 1) else "")
            well = cd.allreduce(torch.tensor(float(done)), op=cd.Min, name="well")
            assert well.item() == float(number != fails)
            if well:
                optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    same(each_rank(2, body))


@pytest.mark.parametrize("fails", [0, 3])
def test_every_rank_gets_one_error_that_names_the_rank_and_its_line(fails):
    def body(rank):
        net = weights({"a": 3, "b": LARGE})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        for number in range(fails + 1):
            optimizer.zero_grad()
            if number == fails and rank == 1:
                with pytest.raises(MemoryError):
                    loss_of(net, 1.0, "middle").backward()
            elif number == fails:
                with pytest.raises(cd.DiscardedStepError, match="rank 1 has not completed its backward pass at"):
                    loss_of(net, 1.0).backward()
            else:
                loss_of(net, 1.0).backward()
                optimizer.step()
        before = net["a"].tolist()
        errors = []
        for use in (optimizer.step, optimizer.synchronize):
            with pytest.raises(cd.DiscardedStepError) as caught:
                use()
            errors.append(str(caught.value))
            assert caught.value.ranks == (1,)
        assert net["a"].tolist() == before
        return errors

    found = each_rank(2, body)
    for errors in found:
        for text in errors:
            assert "this step is discarded on all ranks" in text
            assert "rank 1 has not completed its backward pass at " in text
            assert "test_discarded.py:" in text


def test_gradients_of_a_pass_that_has_failed_are_never_added_to():
    """Without a word the next pass begins anew, on all ranks."""

    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        found = []
        for number in range(6):
            backward(net, 1.0, "middle" if number in {0, 3} and rank == 1 else "")
            if number not in {0, 3}:
                found.append([value.grad[0].item() for value in net.values()])
                optimizer.step()
                net.zero_grad()
        return found

    assert each_rank(2, body) == [[[1.0, 2.0]] * 4] * 2


@pytest.mark.parametrize("ends", ["zero_grad", "step"])
def test_a_local_pass_that_fails_spoils_the_step_unless_its_gradients_are_cleared(ends):
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        for number in range(3):
            with optimizer.no_sync():
                backward(net, 1.0, "middle" if number == 1 and rank == 1 else "")
            if number == 1 and ends == "step":
                with pytest.raises(cd.DiscardedStepError, match="rank 1 has not completed"):
                    loss_of(net, 1.0).backward()
            else:
                if number == 1 and rank == 1:
                    optimizer.zero_grad()
                loss_of(net, 1.0).backward()
                assert net["a"].grad[0] == (1.5 if number == 1 else 2.0)
                optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    same(each_rank(2, body))


@pytest.mark.parametrize("fails", [0, 3])
def test_steps_go_on_where_ranks_have_different_numbers_of_batches(fails):
    def body(rank):
        net = weights({"a": 3, "b": LARGE})
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), uneven="join"
        )
        for number in range(4 + 2 * rank):
            if backward(net, 1.0, "middle" if number == fails and rank == 1 else ""):
                optimizer.step()
            optimizer.zero_grad()
        optimizer.join()
        return net.state_dict()

    same(each_rank(3, body))


@pytest.mark.parametrize("make", MAKERS)
def test_what_a_compressor_keeps_is_not_touched_by_a_discarded_step(make):
    def body(rank, fails):
        net, compression = weights({"a": 30, "b": 40}), make()
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), compression=compression
        )
        for number in range(6):
            optimizer.zero_grad()
            if number == 3 and fails:
                assert not backward(net, 9.0, "middle" if rank == 1 else "")
                optimizer.zero_grad()
            backward(net, 1.0 + rank, "")
            optimizer.step()
        return net.state_dict(), compression.state_dict()

    with_failure = each_rank(2, lambda rank: body(rank, fails=True))
    without = each_rank(2, lambda rank: body(rank, fails=False))
    same([weights for weights, _ in with_failure + without])
    for (_, found), (_, wanted) in zip(with_failure, without, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_sparse_gradients_are_discarded_too():
    def body(rank):
        net = nn.ModuleDict({"table": nn.Embedding(5, 2, sparse=True), "last": nn.Linear(2, 1, bias=False)})
        with torch.no_grad():
            for value in net.parameters():
                value.fill_(1.0)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        for number in range(6):
            optimizer.zero_grad()
            rows = net["table"](torch.tensor([rank, 2]))
            failing = number == 3 and rank == 1
            loss = net["last"](Failing.apply(rows) if failing else rows).sum()
            try:
                loss.backward()
            except (MemoryError, cd.DiscardedStepError):
                assert number == 3
            else:
                optimizer.step()
        return net.state_dict()

    same(each_rank(2, body))
