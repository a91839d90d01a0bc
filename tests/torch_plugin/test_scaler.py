"""Mixed precision: a step that a loss scaler skips is skipped on all ranks or on none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.test_compressed_bucket import MAKERS
from tests.torch_plugin.training import batch, model, same

ALL = [cd.Compression.none, cd.Compression.fp16, cd.Compression.bf16, *MAKERS]
RANKS, STEPS = 3, 9
BAD = {0, 3, 6}
"""Steps in which one rank's loss is not finite; in the first gradients travel alone, then in buckets."""


def train(make, *, clip=True, bad=math.inf, backward_inside=False):
    """Trains in mixed precision; returns by rank the weights, the scales after each step, and which steps were made."""

    def body(rank):
        net = model(torch.float32)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        wrapped = cd.DistributedOptimizer(optimizer, net.named_parameters(), compression=make())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        scales, made = [], []
        for number in range(STEPS):
            inputs, targets = batch(rank, number, torch.float32)
            before = [parameter.detach().clone() for parameter in net.parameters()]
            wrapped.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(net(inputs).float(), targets)
                loss = loss * (bad if number in BAD and rank == 1 else 1.0)
                if backward_inside:
                    scaler.scale(loss).backward()
            if not backward_inside:
                scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(wrapped)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(wrapped)
            scaler.update()
            scales.append(scaler.get_scale())
            made.append(any(not torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True)))
        return net.state_dict(), scales, made

    return each_rank(RANKS, body)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("fused", {"backward_passes_per_step": 2}), ("fused", {}), ("plain", {"op": cd.Adasum})],
    ids=["told in step", "told in backward", "Adasum"],
)
def test_a_step_that_is_discarded_leaves_no_scale_behind(kind, options):
    """A scaler sets it on the optimizer for one step, and multiplies by what it finds there in the next."""

    def body(rank):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=kind == "fused")
        optimizer = cd.DistributedOptimizer(optimizer, [("w", weight)], **options)
        scaler, moved = torch.amp.GradScaler("cpu"), []
        for number in range(6):
            optimizer.zero_grad()
            before = weight.detach().clone()
            try:
                loss = weight[0 if number not in {0, 3} or not rank else 9] + weight[1]
                scaler.scale(loss).backward()  # of two passes the last one is missing
                scaler.step(optimizer)
                scaler.update()
            except (IndexError, cd.DiscardedStepError):
                optimizer.discard_step()
            moved.append((before - weight.detach()).tolist())
        return moved

    assert each_rank(2, body) == [[[0.0, 0.0] if number in {0, 3} else [1.0, 1.0] for number in range(6)]] * 2


def check(found):
    """All ranks have skipped the bad steps, and no other."""
    same([weights for weights, _, _ in found])
    for weights, scales, made in found:
        assert made == [number not in BAD for number in range(STEPS)]
        assert scales == [512.0] * 3 + [256.0] * 3 + [128.0] * 3
        assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_infinity_on_one_rank_is_seen_by_all(make, bad):
    check(train(make, bad=bad))


@pytest.mark.parametrize("make", ALL)
def test_without_clipping(make):
    check(train(make, clip=False))


@pytest.mark.parametrize("fused", [False, True])
def test_what_other_buckets_have_kept_does_not_change_either(fused):
    """A fused optimizer is called all the same, and told to skip the step itself."""

    def body(rank):
        compressor = cd.Compression.topk(ratio=0.25)
        net = nn.ParameterDict({name: nn.Parameter(torch.ones(8)) for name in "ab"})
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=fused)
        wrapped = cd.DistributedOptimizer(optimizer, net.named_parameters(), compression=compressor)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        kept = []
        for number in range(5):
            wrapped.zero_grad()
            bad = math.inf if (rank, number) == (1, 3) else 1.0
            scaler.scale((net["a"] * bad).sum() + (net["b"] * torch.arange(8.0)).sum()).backward()
            scaler.step(wrapped)
            scaler.update()
            kept.append({name: value.clone() for name, value in compressor.residuals.items()})
        assert len(wrapped._coordd._buckets) == 2
        return [torch.equal(kept[number]["b"], kept[number - 1]["b"]) for number in (2, 3, 4)], scaler.get_scale()

    assert each_rank(2, body, fusion_mb=1e-6) == [([False, True, False], 2.0)] * 2


@pytest.mark.parametrize("make", MAKERS)
def test_backward_under_autocast_computes_in_the_types_that_are_there(make):
    inside, outside = train(make, backward_inside=True), train(make)
    same([weights for weights, _, _ in inside], outside[0][0], rtol=1e-5, atol=1e-6)


def test_what_sixteen_bits_cannot_hold_skips_the_step_everywhere():
    """It is finite on each rank, and becomes infinite on the way."""

    def body(rank):
        weight = nn.Parameter(torch.ones(4))
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression=cd.Compression.fp16
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scales = []
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale((weight * (1e5 if (rank, number) == (1, 2) else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return weight.tolist(), scales

    assert each_rank(2, body) == [([-2.0] * 4, [1.0, 1.0, 0.5, 0.5])] * 2


def test_without_a_scaler_what_is_still_to_be_sent_stays_finite():
    """The step may be made without those gradients; those that come later are not spoilt."""

    def body(rank):
        compressor = cd.Compression.topk(ratio=0.1)
        net = model(torch.float32)
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters(), compression=compressor
        )
        finite = []
        for number in range(6):
            inputs, targets = batch(rank, number, torch.float32)
            optimizer.zero_grad()
            (nn.functional.mse_loss(net(inputs), targets) * (math.nan if (rank, number) == (1, 3) else 1.0)).backward()
            finite.append(all(torch.isfinite(parameter.grad).all() for parameter in net.parameters()))
            for parameter in net.parameters():
                parameter.grad.nan_to_num_(0.0)
            optimizer.step()
        assert all(torch.isfinite(value).all() for value in compressor.residuals.values())
        return finite

    assert each_rank(2, body) == [[True, True, True, False, True, True]] * 2


@pytest.mark.parametrize("taken_over", [False, True])
def test_after_a_join_all_take_over_the_scale(taken_over):
    """Rank 0 joins after one step, before the others skip one; their scales, not the step's fate, would part them."""

    def body(rank):
        weight = nn.Parameter(torch.ones(4))
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.25), [("w", weight)])
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

        def step(factor=1.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        step()
        if rank:
            step()
            step(math.inf if rank == 1 else 1.0)
        last = optimizer.join()
        joined = weight.tolist()
        if taken_over:
            scaler.load_state_dict(cd.broadcast_object(scaler.state_dict(), last))
        step()
        return joined, weight.tolist(), scaler.get_scale()

    joined, weights, scales = zip(*each_rank(3, body), strict=True)
    assert joined[0] == joined[1] == joined[2]
    assert (len(set(map(tuple, weights))) == 1) == taken_over
    assert set(scales) == ({8.0} if taken_over else {8.0, 16.0})
