"""Compressions on real ranks, against what a single process makes of the same numbers."""

import math

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.testing import assert_close

import coordd.torch as cd

STEPS = 6
WIDTH = 48


def _gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _arriving(compression: cd.Compressor) -> list[torch.Tensor]:
    """The gradients that a parameter gets, whose own are those of `_gradient`."""
    parameters = {"weight": nn.Parameter(torch.zeros(WIDTH, WIDTH)), "bias": nn.Parameter(torch.zeros(WIDTH))}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    optimizer = cd.DistributedOptimizer(optimizer, parameters.items(), compression=compression)
    arrived = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ((parameters["weight"] * _gradient(cd.rank(), step)).sum() + parameters["bias"].sum()).backward()
        arrived.append(parameters["weight"].grad.clone())
        optimizer.step()
    return arrived


def _mean(step: int) -> torch.Tensor:
    return torch.stack([_gradient(rank, step) for rank in range(cd.size())]).mean(0)


def _assert_equal_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        assert all(torch.equal(tensor, other) for other in cd.allgather(tensor[None]))


def case_int8_is_off_by_half_a_scale_at_most() -> None:
    arrived = _arriving(cd.Compression.int8(block=WIDTH))
    _assert_equal_on_all_ranks(arrived)
    assert_close(arrived[0], _mean(0))
    for step in range(1, STEPS):
        largest = max(_gradient(rank, step).abs().max().item() for rank in range(cd.size()))
        roundings = 1 if cd.size() == 2 else 2  # slices are added up by their owners, and sent anew
        assert 0 < (arrived[step] - _mean(step)).abs().max() <= roundings * largest / 254 * 1.001


def case_what_top_k_and_powersgd_hold_back_is_sent_later() -> None:
    for compression in (cd.Compression.topk(ratio=0.1), cd.Compression.powersgd(rank=2)):
        arrived = _arriving(compression)
        _assert_equal_on_all_ranks(arrived)
        (residual,) = [value for name, value in compression.residuals.items() if name.endswith("weight")]
        kept = cd.allreduce(residual.clone())
        assert_close(sum(arrived) + kept, sum(_mean(step) for step in range(STEPS)), rtol=1e-4, atol=1e-4)
        assert compression.ratio > 1
        assert 0.1 < compression.error < 1


def case_powersgd_sends_matrices_of_low_rank_exactly() -> None:
    left, right = torch.randn(2, 30, 2, generator=torch.Generator().manual_seed(1)).unbind()
    weight = nn.Parameter(torch.zeros(30, 30))
    optimizer = cd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression=cd.Compression.powersgd(rank=2)
    )
    for step in range(4):
        optimizer.zero_grad()
        own = (left * (1 + cd.rank())) @ (right * (1 + step)).T
        (weight * own).sum().backward()
        mean = left @ right.T * (1 + step) * (1 + cd.size()) / 2
        assert_close(weight.grad, mean, rtol=1e-3, atol=1e-3)
        optimizer.step()


def _train(compression: cd.Compressor, *, bad: float = 1.0, steps: int = 12) -> tuple[nn.Module, list[float]]:
    """Trains in mixed precision; the last rank's loss is ``bad`` in some steps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 2))
    optimizer = cd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compression=compression
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scales = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + cd.rank())
        inputs, targets = torch.randn(6, 5, generator=generator), torch.randn(6, 2, generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse_loss(model(inputs).float(), targets)
        scaler.scale(loss * (bad if step % 5 == 4 and cd.rank() == cd.size() - 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


def case_a_step_is_skipped_on_all_ranks_or_on_none() -> None:
    for make in (cd.Compression.none, cd.Compression.fp16, cd.Compression.int8, cd.Compression.topk):
        for bad in (math.inf, math.nan):
            model, scales = _train(make(), bad=bad)
            assert scales == [256.0] * 4 + [128.0] * 5 + [64.0] * 3
            for tensor in model.state_dict().values():
                assert torch.isfinite(tensor).all()
                _assert_equal_on_all_ranks([tensor])


def case_training_is_nearly_that_without_compression() -> None:
    plain = _train(cd.Compression.none())[0].state_dict()
    for compression in (cd.Compression.fp16(), cd.Compression.int8()):
        assert_close(_train(compression)[0].state_dict(), plain, rtol=0.05, atol=0.005)


def case_an_allreduce_of_its_own() -> None:
    values = _gradient(cd.rank(), 0).requires_grad_()
    summed = cd.allreduce(values, op=cd.Sum, compression=cd.Compression.int8, name="alone")
    assert_close(summed, _mean(0) * cd.size(), rtol=0.02, atol=0.02 * cd.size())
    _assert_equal_on_all_ranks([summed.detach()])
    (summed * (1 + cd.rank())).sum().backward()
    assert_close(values.grad, torch.full_like(values, sum(range(1, cd.size() + 1))))
