"""Small models and their training: on ranks that are threads, and by one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank

__all__ = [
    "LARGE",
    "ROWS",
    "STEPS",
    "WAYS",
    "alone",
    "attempts",
    "batch",
    "home",
    "model",
    "same",
    "settled",
    "together",
    "trained",
    "weights",
    "wrapped",
]

STEPS = 4
ROWS = 6

Weights = dict[str, torch.Tensor]
Train = Callable[[nn.Module, Any, torch.Tensor, torch.Tensor], Any]

WAYS = [{}, {"shared_memory": False}, {"simulate_hosts": 2}, {"overlap": False}]
LARGE = 20_000  # elements that are copied at once; fewer wait for each other


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model that is equal wherever it is made; no generator is shared between the ranks, which are threads."""
    made = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.5)
    return made


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one rank in one step."""
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 5, generator=source).to(dtype), torch.randn(ROWS, 1, generator=source).to(dtype)


def plain_step(net: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """What every training loop does."""
    optimizer.zero_grad()
    nn.functional.mse_loss(net(inputs), targets).backward()
    optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def trained(net: nn.Module, optimizer: Any, batches: Any, step: Train = plain_step) -> Weights:
    """Makes the steps, and returns the weights."""
    for inputs, targets in batches:
        step(net, optimizer, inputs, targets)
    return net.state_dict()


def alone(count: int, *, make: Callable[[nn.Module], Any] = sgd, step: Train = plain_step) -> Weights:
    """Trains in one process on the ranks' batches, joined."""
    net = model()
    joined = [
        tuple(torch.cat(parts) for parts in zip(*(batch(rank, number) for rank in range(count)), strict=True))
        for number in range(STEPS)
    ]
    return trained(net, make(net), joined, step)


def together(
    count: int,
    *,
    make: Callable[[nn.Module], Any] = sgd,
    step: Train = plain_step,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> list[Weights]:
    """Trains on ranks, with a `DistributedOptimizer` of these options."""

    def body(rank: int) -> Weights:
        net = model()
        optimizer = cd.DistributedOptimizer(make(net), net.named_parameters(), **options)
        return trained(net, optimizer, [batch(rank, number) for number in range(STEPS)], step)

    return each_rank(count, body, **(settings or {}))


def same(found: list[Weights], wanted: Weights | None = None, **tolerance: float) -> None:
    """Asserts that the ranks have equal bits, and nearly those of the reference."""
    for weights in found[1:]:
        for name, value in weights.items():
            assert torch.equal(value, found[0][name]), f"{name} differs between the ranks"
    if wanted is not None:
        torch.testing.assert_close(found[0], wanted, **tolerance)


def weights(sizes: dict[str, int], **options: Any) -> nn.ParameterDict:
    options = {"dtype": torch.float64, **options}
    return nn.ParameterDict({name: nn.Parameter(torch.ones(size, **options)) for name, size in sizes.items()})


def wrapped(net: nn.Module, **options: Any) -> Any:
    return cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), **options)


def settled(net: nn.Module, optimizer: Any) -> None:
    """Lets the gradients move in: after the first step they have their places."""
    optimizer.zero_grad()
    sum(value.real.sum() for value in net.parameters()).backward()
    optimizer.step()


def attempts(
    net: nn.ParameterDict, numbers: int, attempt: Callable[[Any, int], object], *errors: type[Exception]
) -> tuple[list[tuple[int, type[Exception]]], Weights]:
    """Makes steps, and discards those that fail; gradients are cleared after a step only.

    Args:
        net: what is trained.
        numbers: how many times it is tried.
        attempt: makes the passes of a step, with the optimizer and the number of the try.
        errors: what it may raise besides what coordd tells of steps.

    Returns:
        the errors, with their numbers, and the weights at the end.
    """
    optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
    heard: list[tuple[int, type[Exception]]] = []
    for number in range(numbers):
        try:
            attempt(optimizer, number)
        except (*errors, cd.MismatchError, cd.DiscardedStepError) as error:
            heard.append((number, type(error)))
            optimizer.discard_step()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return heard, net.state_dict()


def home(gradient: torch.Tensor) -> int:
    return gradient.untyped_storage().data_ptr()
