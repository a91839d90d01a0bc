"""Training through DistributedOptimizer, against a single process that takes the global batch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import coordd.torch as cd

SHARE = 6
Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[nn.Module], Optimizer]


def _network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    count = SHARE * cd.size()
    return torch.randn(count, 5, generator=generator), torch.randn(count, 2, generator=generator)


def _share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[cd.rank() :: cd.size()]


def _momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _alone(make: MakeOptimizer = _momentum, *, steps: int = 5) -> nn.Module:
    """What a single process trains on the global batches."""
    model = _network()
    optimizer = make(model)
    for step in range(steps):
        inputs, targets = _batch(step)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def _together(make: MakeOptimizer = _momentum, *, steps: int = 5, **options: Any) -> nn.Module:
    """What the ranks train, each on its share."""
    model = _network()
    optimizer = cd.DistributedOptimizer(make(model), model.named_parameters(), **options)
    for step in range(steps):
        inputs, targets = map(_share, _batch(step))
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def _assert_same(one: nn.Module, other: nn.Module, *, tolerance: float = 1e-5) -> None:
    assert_close(one.state_dict(), other.state_dict(), rtol=tolerance, atol=tolerance)


def case_every_kind_of_optimizer() -> None:
    makers: list[MakeOptimizer] = [
        _momentum,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda model: torch.optim.RMSprop(model.parameters(), lr=0.001),
        lambda model: torch.optim.SGD([{"params": p, "lr": 0.05 * (i + 1)} for i, p in enumerate(model.parameters())]),
    ]
    for make in makers:
        _assert_same(_together(make), _alone(make), tolerance=1e-4)


def case_ranks_stay_bitwise_equal() -> None:
    for tensor in _together(steps=20).state_dict().values():
        assert all(torch.equal(tensor, other) for other in cd.allgather(tensor[None]))


def case_options_do_not_change_the_result() -> None:
    alone = _alone()
    _assert_same(_together(gradient_predivide_factor=4.0), alone)
    _assert_same(_together(compression=cd.Compression.fp16), alone, tolerance=1e-2)
    _assert_same(_together(compression=cd.Compression.bf16), alone, tolerance=5e-2)


def case_the_class_and_its_helpers_stay_the_users() -> None:
    model = _network()
    optimizer = cd.DistributedOptimizer(_momentum(model), model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    mse_loss(model(torch.ones(2, 5)), torch.ones(2, 2)).backward()
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]


def case_several_passes_before_a_step() -> None:
    model, alone = _network(), _network()
    optimizer = cd.DistributedOptimizer(_momentum(model), model.named_parameters(), backward_passes_per_step=2)
    reference = _momentum(alone)
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        for part in range(2):
            inputs, targets = _batch(2 * step + part)
            mse_loss(model(_share(inputs)), _share(targets)).backward()
            mse_loss(alone(inputs), targets).backward()
        optimizer.step()
        reference.step()
    # Horovod's meaning: the sum over the passes, averaged over the ranks.
    _assert_same(model, alone)


def case_clipping_with_synchronize() -> None:
    _assert_clipped(explicit=True)


def case_clipping_without_synchronize() -> None:
    _assert_clipped(explicit=False)


def _assert_clipped(*, explicit: bool) -> None:
    model, alone = _network(), _network()
    optimizer = cd.DistributedOptimizer(_momentum(model), model.named_parameters())
    reference = _momentum(alone)
    for step in range(4):
        inputs, targets = _batch(step)
        optimizer.zero_grad()
        reference.zero_grad()
        mse_loss(alone(inputs), targets).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        reference.step()
        mse_loss(model(_share(inputs)), _share(targets)).backward()
        if explicit:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if explicit:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    _assert_same(model, alone)


def case_a_parameter_without_a_gradient_on_some_ranks_or_all() -> None:
    layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
    for layer in layers:
        nn.init.ones_(layer.weight)
    optimizer = cd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0), layers.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        output = layers[0](torch.ones(1, 3))
        if cd.rank() == 0:
            output = output + layers[1](torch.ones(1, 3))
        output.sum().backward()
        optimizer.step()
    assert layers[0].weight.flatten().tolist() == [-2.0] * 9
    assert_close(layers[1].weight, torch.full((3, 3), 1.0 - 3.0 / cd.size()))
    assert layers[2].weight.flatten().tolist() == [1.0] * 9


def case_two_optimizers_take_turns() -> None:
    first, second = _network(), _network()
    one = cd.DistributedOptimizer(_momentum(first), first.named_parameters())
    two = cd.DistributedOptimizer(_momentum(second), second.named_parameters())
    for step in range(5):
        inputs, targets = map(_share, _batch(step))
        for model, optimizer in ((first, one), (second, two)):
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
    _assert_same(first, _alone())
    _assert_same(second, _alone())


def case_gradient_checkpointing() -> None:
    model = _network()
    optimizer = cd.DistributedOptimizer(_momentum(model), model.named_parameters())
    for step in range(5):
        inputs, targets = map(_share, _batch(step))
        optimizer.zero_grad()
        mse_loss(checkpoint(model, inputs, use_reentrant=False), targets).backward()
        optimizer.step()
    _assert_same(model, _alone())


def case_a_closure_is_reduced_each_time() -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    model, alone = _network(), _network()
    optimizer, reference = cd.DistributedOptimizer(make(model), model.named_parameters()), make(alone)
    inputs, targets = _batch(0)

    def closure(network: nn.Module, take: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def compute() -> torch.Tensor:
            network.zero_grad()
            loss = mse_loss(network(take(inputs)), take(targets))
            loss.backward()
            # LBFGS looks at the loss too, so it has to be that of all ranks.
            return cd.allreduce(loss.detach()) if network is model else loss.detach()

        return compute

    optimizer.step(closure(model, _share))
    reference.step(closure(alone, lambda tensor: tensor))
    _assert_same(model, alone, tolerance=1e-3)


def case_a_rank_with_one_batch_more_than_others_that_go_on_is_told() -> None:
    """The last rank is in an allreduce while the others reduce gradients; the steps after that one count again."""
    model = _network()
    optimizer = cd.DistributedOptimizer(_momentum(model), model.named_parameters())
    for step in range(5):
        if step == 2 and cd.size() > 1 and cd.rank() == cd.size() - 1:
            with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
                cd.allreduce(torch.ones(1), name="metric")
        inputs, targets = map(_share, _batch(step))
        optimizer.zero_grad()
        try:
            mse_loss(model(inputs), targets).backward()
        except (cd.MismatchError, cd.DiscardedStepError):
            assert step == 2
            continue
        assert step != 2 or cd.size() == 1
        optimizer.step()
    wanted = cd.broadcast_object(model.state_dict())
    assert_close(model.state_dict(), wanted, rtol=0, atol=0)
