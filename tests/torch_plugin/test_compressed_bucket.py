"""Buckets in the rounds of a compressor: what is kept, and for whom."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd_torch.rounds import Mean
from tests.local_ranks import each_rank
from tests.torch_plugin.training import WAYS, alone, batch, model, plain_step, same, trained

mse = nn.functional.mse_loss
Compression = cd.Compression


MAKERS = [Compression.int8, lambda: Compression.topk(ratio=0.1), lambda: Compression.powersgd(rank=1)]


class Faithful(cd.Compressor):
    """Loses nothing, in three rounds; remembers how often it was asked for what."""

    feedback = True

    def exchange(self, cargo):
        first = cargo.flat.clone()
        (sum_of_twos,) = yield Mean(torch.full((2,), 2.0))
        assert sum_of_twos.tolist() == [2.0, 2.0]
        (mean,) = yield Mean(first)
        yield Mean(mean[:1])
        for name in cargo.names:
            before = cargo.recall(name)
            cargo.remember(name, torch.ones(1) if before is None else before + 1)
        cargo.flat.zero_()
        return mean


def run(make, *, ranks=2, steps=6, step=plain_step, settings=None, dtype=torch.float64, **options):
    """Trains on ranks; returns each one's weights and compressor."""

    def body(rank):
        compressor = make()
        net = model(dtype)
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            net.named_parameters(),
            compression=compressor,
            **options,
        )
        batches = [batch(rank, number, dtype) for number in range(steps)]
        return trained(net, optimizer, batches, step), compressor

    found = each_rank(ranks, body, **(settings or {}))
    same([weights for weights, _ in found])
    return found


@pytest.mark.parametrize("settings", [*WAYS, {"lock_steps": 0}, {"lock_steps": 2, "cycle_ms": 0.0}, {"fusion_mb": 0.0}])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_compressor_that_loses_nothing_changes_nothing(settings, ranks):
    found = run(Faithful, ranks=ranks, steps=4, settings=settings)
    same([weights for weights, _ in found], alone(ranks))
    for _, compressor in found:
        counts = {value.item() for value in compressor.memory.values()}
        assert counts == {3.0}, "the first step is reduced gradient by gradient, as it is"


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("options", [{}, {"op": cd.Sum}, {"settings": {"fusion_mb": 1e-4}}, {"dtype": torch.bfloat16}])
def test_ranks_stay_equal(make, options):
    for weights, compressor in run(make, ranks=3, **options):
        assert all(torch.isfinite(value).all() for value in weights.values())
        assert compressor.error > 0


def test_a_sum_is_the_average_times_the_ranks():
    def halved(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        (mse(net(inputs), targets) / 2).backward()
        optimizer.step()

    (sums, _), _ = run(Compression.int8, op=cd.Sum, step=halved)
    (means, _), _ = run(Compression.int8)
    torch.testing.assert_close(sums, means)


def skipping(net, optimizer, inputs, targets):
    """A step that is thought better of, before one that is made, once gradients travel in buckets."""
    if optimizer._coordd._buckets:
        optimizer.zero_grad()
        (7 * mse(net(targets.expand(-1, 5)), inputs[:, :1])).backward()
    plain_step(net, optimizer, inputs, targets)


@pytest.mark.parametrize("make", [*MAKERS, Faithful])
def test_a_step_that_is_skipped_leaves_no_trace(make):
    (weights, compressor), _ = run(make)
    (again, other), _ = run(make, step=skipping)
    for name, value in weights.items():
        assert torch.equal(value, again[name])
    for kind in ("residuals", "memory"):
        assert compressor.state_dict()[kind].keys() == other.state_dict()[kind].keys()
        for name, value in compressor.state_dict()[kind].items():
            assert torch.equal(value, other.state_dict()[kind][name])


def test_what_is_still_to_be_sent_goes_with_a_parameter_into_another_bucket():
    """As autotune moves it; nothing is lost on the way."""

    def body(rank):
        compressor = Compression.topk(ratio=0.1)
        net = model()
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression=compressor
        )
        reducer = optimizer._coordd
        for number in range(6):
            plain_step(net, optimizer, *batch(rank, number))
            before = compressor.state_dict()["residuals"]
            reducer._rearrange(
                type(reducer._settings)(
                    fusion_mb=0.0001 if number % 2 else 1.0,
                    cycle_ms=1.0,
                    buckets=1,
                    algorithm="overlap",
                    compression="none" if number == 3 else "chosen",
                )
            )
            after = compressor.state_dict()["residuals"]
            assert all(torch.equal(after[name], value) for name, value in before.items())
        assert len(reducer._buckets) > 1
        assert any(value.any() for value in after.values())
        return net.state_dict()

    same(each_rank(2, body))


def test_what_no_rank_has_a_gradient_for_is_not_sent():
    """Else it would be lost: nobody uses what arrives."""

    def body(rank):
        compressor = Compression.topk(ratio=0.25)
        net = nn.ParameterDict({name: nn.Parameter(torch.zeros(4, dtype=torch.float64)) for name in "ab"})
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), compression=compressor
        )
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        for _ in range(2):
            optimizer.zero_grad()
            ((net["a"] + 2 * net["b"]) @ weights).backward()
            optimizer.step()
        kept = compressor.residuals["b"].clone()
        assert kept.any()
        for _ in range(3):
            optimizer.zero_grad()
            (0.1 * net["a"] @ weights).backward()
            optimizer.step()
            assert net["b"].grad is None
            assert torch.equal(compressor.residuals["b"], kept)
        return net.state_dict()

    same(each_rank(2, body))


def test_a_rank_without_a_gradient_still_sends_what_it_has_kept():
    def body(rank):
        compressor = Compression.topk(ratio=0.25)
        net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4, dtype=torch.float64))})
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), compression=compressor
        )
        for number in range(8):
            optimizer.zero_grad()
            if rank == 0 or number < 2:
                (net["a"] @ torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) * (number < 2)).backward()
            optimizer.step()
        assert not compressor.residuals["a"].any()
        return net["a"].tolist()

    assert each_rank(2, body) == [[-2.0, -4.0, -6.0, -8.0]] * 2


def test_several_passes_before_a_step():
    def twice(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        for part in (slice(0, 3), slice(3, 6)):
            (mse(net(inputs[part]), targets[part]) / 2).backward()
        optimizer.step()

    found = run(Faithful, steps=4, step=twice, backward_passes_per_step=2)
    same([weights for weights, _ in found], alone(2))


def test_a_process_set_compresses_for_itself():
    def body(rank):
        compressor = Compression.int8()
        net = model()
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            net.named_parameters(),
            compression=compressor,
            process_set=cd.ProcessSet([0, 2]),
        )
        weights = trained(net, optimizer, [batch(rank, number) for number in range(4)])
        return weights, compressor.ratio

    zero, one, two = each_rank(3, body)
    same([zero[0], two[0]])
    assert one[1] == 1.0, "it has sent nothing"
    assert zero[1] == two[1] > 1


@pytest.mark.parametrize("late", [False, True])
def test_what_is_still_to_be_sent_survives_a_checkpoint(late):
    """Loaded before the first step, or when the gradients have moved in."""
    slopes = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def begin():
        compressor = Compression.topk(ratio=0.25)
        net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4, dtype=torch.float64))})
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        return compressor, net, cd.DistributedOptimizer(optimizer, net.named_parameters(), compression=compressor)

    def step(net, optimizer, factor):
        optimizer.zero_grad()
        (net["a"] @ slopes * factor).backward()
        optimizer.step()

    def first_half(rank):
        compressor, net, optimizer = begin()
        for _ in range(3):
            step(net, optimizer, 1.0 + rank)
        return compressor.state_dict(), net.state_dict()

    saved = each_rank(2, first_half)

    def second_half(rank):
        compressor, net, optimizer = begin()
        if late:
            step(net, optimizer, 0.0)
            step(net, optimizer, 0.0)
        compressor.load_state_dict(saved[rank][0])
        net.load_state_dict(saved[rank][1])
        for _ in range(6):
            step(net, optimizer, 0.0)
        return net["a"].tolist()

    assert saved[0][1]["a"].tolist() != [-4.5, -9.0, -13.5, -18.0]
    assert each_rank(2, second_half) == [[-4.5, -9.0, -13.5, -18.0]] * 2


def test_a_loss_scale_that_changes_scales_what_is_kept():
    (_, compressor), _ = run(lambda: Compression.topk(ratio=0.1))
    before = compressor.state_dict()["residuals"]
    compressor.rescale(0.5)
    for name, value in compressor.residuals.items():
        assert torch.equal(value, before[name] / 2)


def test_a_state_from_before_the_first_step_has_no_residuals():
    (_, compressor), _ = run(lambda: Compression.topk(ratio=0.1))
    assert any(value.any() for value in compressor.residuals.values())
    compressor.load_state_dict(Compression.topk(ratio=0.1).state_dict())
    assert not any(value.any() for value in compressor.residuals.values())


def test_an_error_in_a_later_round_reaches_backward():
    class Broken(Faithful):
        def exchange(self, cargo):
            yield Mean(cargo.flat)
            text = "no second round"
            raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="no second round"):
        run(Broken)


@pytest.mark.parametrize("op", [cd.Average, cd.AveragePresent, cd.Sum])
@pytest.mark.parametrize("make", [Faithful, *MAKERS])
def test_who_has_joined_counts_as_the_operation_says(make, op):
    """Rank 2 is through after three steps, and takes part with nothing in the two that the others still make."""

    def body(compression):
        def each(rank):
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer = cd.DistributedOptimizer(optimizer, net.named_parameters(), compression(), op=op, uneven="join")
            for number in range(3 if rank == 2 else 5):
                plain_step(net, optimizer, *batch(rank, number))
            optimizer.join()
            plain_step(net, optimizer, *batch(rank, 9))  # all together again
            return net.state_dict()

        return each

    found, plain = each_rank(3, body(make)), each_rank(3, body(Compression.none))
    same(found)
    if make in {Faithful, Compression.int8}:
        same(found, plain[0], rtol=1e-9 if make is Faithful else 0.05, atol=1e-9 if make is Faithful else 0.02)
