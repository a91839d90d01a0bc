"""Adasum of tensors, and as an optimizer's way to combine steps, on ranks that are threads."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd import api
from coordd_torch import adasum
from tests.local_ranks import each_rank
from tests.torch_plugin.training import model


def adaptive(vectors):
    """As the paper writes it, in pairs and pairs of pairs."""
    vectors = [vector.double() for vector in vectors]
    while len(vectors) > 1:
        pairs = [vectors[at : at + 2] for at in range(0, len(vectors), 2)]
        vectors = [pair[0] if len(pair) == 1 else _pair(*pair) for pair in pairs]
    return vectors[0]


def _pair(left, right):
    both = (left * right).sum()
    kept = [1 - both / (2 * one.square().sum()) for one in (left, right)]
    return kept[0] * left + kept[1] * right


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_any_number_of_ranks(count, dtype):
    inputs = [torch.randn(17, 3, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(count)]

    def body(rank):
        found = cd.grouped_allreduce([inputs[rank], inputs[rank] * 2], op=cd.Adasum)
        assert found[0].dtype == dtype
        return found

    loose = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for single, double in each_rank(count, body):
        torch.testing.assert_close(single.double(), adaptive(inputs), rtol=loose, atol=loose)
        torch.testing.assert_close(double.double(), 2 * adaptive(inputs), rtol=loose, atol=2 * loose)


def test_what_has_no_direction_is_refused():
    def body(_):
        for dtype in (torch.int32, torch.complex64):
            with pytest.raises(cd.ArgumentError, match="Adasum weighs real gradients"):
                cd.allreduce(torch.ones(2).to(dtype), op=cd.Adasum)

    each_rank(2, body)


def test_a_process_set_of_three():
    def body(rank):
        if rank != 1:
            some = cd.ProcessSet([0, 2, 3])
            assert cd.allreduce(torch.ones(4), op=cd.Adasum, process_set=some).tolist() == [1.0] * 4

    each_rank(4, body)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.01)])
def test_an_optimizer_adds_up_the_steps_that_the_ranks_would_make(make):
    def batch(rank):
        return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def stepped(rank, wrap):
        mine = model()
        optimizer = wrap(make(mine.parameters()), mine)
        mine(batch(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in mine.parameters()]

    def body(rank):
        return stepped(rank, lambda plain, mine: cd.DistributedOptimizer(plain, mine.named_parameters(), op=cd.Adasum))

    alone = [stepped(rank, lambda plain, _: plain) for rank in range(3)]
    start = [parameter.detach() for parameter in model().parameters()]
    for found in each_rank(3, body):
        for place, parameter in enumerate(found):
            changes = [own[place] - start[place] for own in alone]
            torch.testing.assert_close(parameter, start[place] + adaptive(changes))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_loss_scaler_skips_on_one_rank_is_skipped_on_all(fused):
    def body(rank):
        weight = nn.Parameter(torch.ones(4))
        optimizer = cd.DistributedOptimizer(
            torch.optim.Adam([weight], lr=0.1, fused=fused), [("w", weight)], op=cd.Adasum
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        made, gradients = [], []
        for number in range(4):
            before = weight.detach().clone()
            optimizer.zero_grad()
            bad = math.inf if (rank, number) == (1, 2) else 1.0
            scaler.scale((weight * (rank + 1) * bad).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            made.append(not torch.equal(weight, before))
            gradients.append(weight.grad.isfinite().all().item())
        return weight.tolist(), made, gradients

    (first, *_), (second, *_) = found = each_rank(2, body)
    assert first == second
    assert [made for _, made, _ in found] == [[True, True, False, True]] * 2
    assert [gradients for *_, gradients in found] == [[True] * 4, [True, True, False, True]]


def test_a_step_that_fails_on_one_rank_is_undone_on_the_others():
    """They have made their own steps, and wait to combine them."""

    def body(rank):
        mine, seen = model(), []
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), op=cd.Adasum)

        def closure():
            optimizer.zero_grad()
            mine(torch.full((2, 5), rank + 1.0, dtype=torch.float64)).square().mean().backward()
            if rank and len(seen) == 1:
                raise ValueError("no batch")

        for number in range(4):
            try:
                optimizer.step(closure)
            except (cd.CoorddError, ValueError):
                assert number == 1
                optimizer.discard_step()
            seen.append([parameter.tolist() for parameter in mine.parameters()])
        return seen

    first, second = each_rank(2, body)
    assert first == second
    assert first[0] == first[1] != first[2]


class Failing(torch.optim.SGD):
    """Fails after it has changed the parameters, if told to; torch calls hooks in the base class's step, too."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise MemoryError("in the optimizer")


@pytest.mark.parametrize("scheduled", ["before", "after", "not"])
@pytest.mark.parametrize("failing", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_parameters_that_are_loaded_after_a_failed_step_are_kept(scheduled, failing):
    """The parameters that the step saved must not come back later."""

    def body(rank):
        weight = torch.nn.Parameter(torch.ones(3))
        torch.optim.SGD([weight], lr=1.0)  # adds hooks to the base class's step
        plain = Failing([weight], lr=1.0)
        schedule = [torch.optim.lr_scheduler.ConstantLR(plain, 1.0)] if scheduled == "before" else []
        optimizer = cd.DistributedOptimizer(plain, [("weight", weight)], op=cd.Adasum)
        schedule += [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)] if scheduled == "after" else []
        weight.sum().backward()
        optimizer.fails = rank in failing
        if rank in failing:
            with pytest.raises(MemoryError):
                optimizer.step()
            undone = weight.tolist()
        if len(failing) == 1:
            if rank not in failing:
                with pytest.raises(cd.CoorddError):
                    optimizer.step()
                undone = weight.tolist()
            optimizer.discard_step()
        optimizer.fails = False
        with torch.no_grad():
            weight.fill_(5.0)
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        for each in schedule:
            each.step()
        return undone, weight.tolist()

    assert each_rank(2, body) == [([1.0] * 3, [4.0] * 3)] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_failed_step_does_not_count_in_the_next(fused):
    def body(_):
        weight = torch.nn.Parameter(torch.ones(3))
        plain = torch.optim.SGD([weight], lr=1.0, fused=fused)
        optimizer = cd.DistributedOptimizer(plain, [("weight", weight)], op=cd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(2):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            plain.param_groups[0]["lr"] = None if number == 0 else 1.0  # a TypeError within the step
            with pytest.raises(TypeError) if number == 0 else contextlib.nullcontext():
                scaler.step(optimizer)
            scaler.update()
        return weight.tolist()

    assert each_rank(2, body) == [[0.0] * 3] * 2


class Forgiving(torch.optim.SGD):
    """Catches an error of its base class's step, and makes the step itself."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = None
        with contextlib.suppress(TypeError):
            super().step(closure)
        for group in self.param_groups:
            group["lr"] = 1.0
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad)


def test_a_step_whose_base_class_fails_and_is_caught_is_combined():
    def body(rank):
        weight = torch.nn.Parameter(torch.ones(3))
        torch.optim.SGD([weight], lr=1.0)  # adds hooks to the base class's step
        optimizer = cd.DistributedOptimizer(Forgiving([weight], lr=1.0), [("weight", weight)], op=cd.Adasum)
        for _ in range(2):
            weight.grad = torch.full((3,), rank + 1.0)
            optimizer.step()
        return weight.tolist()

    assert each_rank(2, body) == [[1.0 - 2 * 1.5] * 3] * 2


def test_an_optimizer_of_adasum_is_freed_at_once():
    def body(_):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)], op=cd.Adasum)
        weight.sum().backward()
        optimizer.step()
        lives = weakref.ref(optimizer)
        cd.barrier()
        del optimizer
        return lives()

    gc.disable()
    try:
        assert each_rank(2, body) == [None, None]
    finally:
        gc.enable()


def test_a_step_that_is_interrupted_on_one_rank_fails_the_job(monkeypatch):
    """As by a signal's handler, while the ranks exchange their changes: the others make the step."""

    def interrupted(*args, **options):
        handle = usual(*args, **options)
        if api.rank() == 1:
            text = "a handler's"
            raise TimeoutError(text)
        return handle

    def body(rank):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=cd.Adasum)
        weight.sum().backward()
        with pytest.raises(TimeoutError) if rank else contextlib.suppress(cd.PeerError):
            optimizer.step()
        with pytest.raises(cd.PeerError, match="rank 1 was interrupted by TimeoutError: a handler's during a step"):
            [cd.barrier() for _ in range(1000)]

    usual = adasum.allreduce_async_
    monkeypatch.setattr(adasum, "allreduce_async_", interrupted)
    each_rank(2, body)


def test_ranks_with_different_numbers_of_steps_go_on_together_after_a_join():
    def body(rank):
        mine = model()
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters(), op=cd.Adasum, uneven="join"
        )
        for _ in range(2):
            for _ in range(2 + rank):
                optimizer.zero_grad()
                mine(torch.ones(2, 5, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
            optimizer.join()
        return [parameter.tolist() for parameter in mine.parameters()]

    first, second = each_rank(2, body)
    assert first == second
