"""What ranks must have in common is compared when a pipeline is made; and what one rank refuses there, all hear."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import coordd.torch as cd
from tests.mpi.cases import ranks

HEARD_SECONDS = 10.0  # far more than it takes: 2 s are promised, on a machine that has nothing else to do


def dense(*sizes: int, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in itertools.pairwise(sizes)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def made(model: Any = None, loss: Any = functional.mse_loss, weight: Any = None, **settings: Any) -> cd.Pipeline:
    config = cd.PipelineConfig(microbatches=2, split="layers", **settings)
    return cd.Pipeline(model or dense(4, 4, 4, 4), config, optimizer=sgd, loss=loss, weight=weight)


def apart(make: Callable[[int], Any], told: str, **settings: Any) -> None:
    """All ranks are told what differs, and go on."""
    with pytest.raises(cd.MismatchError, match=told):
        make(cd.rank(), **settings)
    assert cd.allreduce(torch.ones(1), op=cd.Sum) == cd.size()


@ranks(2, 4)
def case_other_initial_values_of_a_built_model() -> None:
    for settings in ({}, {"data_parallel": cd.size()}):
        apart(lambda rank, **chosen: made(dense(4, 4, 4, 4, 4, seed=rank), **chosen), "initial values", **settings)


def frozen(model: nn.Module, *, on: int) -> nn.Module:
    model[0].weight.requires_grad_(cd.rank() != on)
    return model


@ranks(2)
def case_a_layer_that_is_frozen_on_one_rank() -> None:
    for rank in range(2):
        apart(lambda _, rank=rank: made(frozen(dense(4, 4, 4, 4), on=rank)), "0.weight.*frozen")
        apart(lambda _, rank=rank: made(lambda: frozen(dense(4, 4, 4, 4), on=rank)), "0.weight.*frozen")


@ranks(2)
def case_a_layer_in_evaluation_mode_on_one_rank() -> None:
    """It stays so in training, so the rank that has the stage would decide."""

    def made_with(rank: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        for layer in (model[1], model[3]) if cd.rank() == rank else ():
            layer.eval()
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        return model

    for rank in range(2):
        apart(lambda _, rank=rank: made(made_with(rank)), "1: Dropout.*in evaluation mode.*3: BatchNorm1d")
    made(made_with(0).eval() if cd.rank() else made_with(2))  # a pipeline trains a model that is in evaluation mode


@ranks(2)
def case_other_initial_values_of_builders() -> None:
    apart(lambda rank: made(lambda: dense(4, 4, 4, 4, seed=rank)), r"initial values.*torch\.manual_seed")


@ranks(2)
def case_another_depth_or_width_or_layer() -> None:
    apart(lambda rank: made(dense(*[4] * (4 + rank))), "2.weight|3.weight")
    apart(lambda rank: made(dense(4, 4 + rank, 4, 4)), "0.weight")
    apart(lambda rank: made(lambda: dense(4, 4 + rank, 4, 4)), "0.weight")
    apart(lambda rank: made(lambda: dense(*[4] * (4 + rank))), "[23].weight")
    activations = (nn.ReLU(), nn.Tanh())
    apart(lambda rank: made(nn.Sequential(dense(4, 4, 4), activations[rank])), "ReLU|Tanh")
    apart(lambda rank: made(nn.Sequential(dense(4, 4, 4), nn.Dropout((rank + 1) / 10))), "Dropout")


@ranks(2)
def case_another_loss() -> None:
    losses = (functional.mse_loss, functional.l1_loss)
    apart(lambda rank: made(loss=losses[rank]), "the loss")
    apart(lambda rank: made(loss=functools.partial(functional.smooth_l1_loss, beta=1.0 + rank)), "the loss")
    apart(lambda rank: made(loss=functools.partial(losses[rank])), "the loss")
    apart(lambda rank: made(loss=nn.HuberLoss(delta=1.0 + rank)), "the loss.*delta")
    apart(lambda rank: made(loss=nn.CrossEntropyLoss(label_smoothing=rank / 10)), "the loss")
    apart(lambda rank: made(loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0, 4.0 + rank]))), "the loss")


@ranks(2)
def case_a_weight_of_microbatches_on_one_rank_only() -> None:
    apart(lambda rank: made(weight=None if rank else lambda _, y: len(y)), "weights of microbatches")


class Noted:
    """A loss that knows its rank, to log it."""

    def __init__(self) -> None:
        self.rank = cd.rank()

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, targets)


@ranks(2)
def case_what_is_given_to_a_pipeline_by_mistake() -> None:
    model = dense(4, 4, 4)
    optimizer: Any = sgd(model.parameters())
    with pytest.raises(cd.ArgumentError, match=r"optimizer= is a function .* not a SGD"):
        cd.Pipeline(model, optimizer=optimizer, loss=functional.mse_loss)
    with pytest.raises(cd.ArgumentError, match=r"torch\.as_tensor\(\)"):
        made().train_batch(np.ones((4, 4)), np.ones((4, 4)))
    state: Any = {}
    with pytest.raises(cd.ArgumentError, match="takes an optimizer, not a dict"):
        cd.broadcast_optimizer_state(state)
    assert cd.allreduce(torch.ones(1), op=cd.Sum) == cd.size()


@ranks(2)
def case_functions_that_return_no_optimizer() -> None:
    def forgets(parameters: Any) -> Any:
        sgd(parameters)

    for everywhere in (True, False):
        refuses = everywhere or cd.rank() == 1
        with pytest.raises(cd.CoorddError, match=r"must return an optimizer of the parameters.*returned None"):
            cd.Pipeline(dense(4, 4, 4, 4), optimizer=forgets if refuses else sgd, loss=functional.mse_loss)
    with pytest.raises(cd.ArgumentError, match="returned a tuple"):
        cd.Pipeline(dense(4, 4, 4, 4), optimizer=lambda found: (sgd(found), None), loss=functional.mse_loss)


@ranks(2)
def case_a_loss_may_know_its_rank() -> None:
    x, rank = torch.ones(4, 4), cd.rank()

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert rank == cd.rank()
        return functional.mse_loss(output, targets)

    assert made(loss=Noted()).train_batch(x, x) == made(loss=loss).train_batch(x, x)


class Branching(nn.Module):
    """Cannot be captured where it is told so."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyError("no such weights here")
        return self.second(self.first(x).relu())


def refused_on(failing: int, make: Callable[[bool], Any]) -> None:
    """The others hear of what one rank fails with, although that rank's script catches it and goes on."""
    began = time.monotonic()
    with pytest.raises(Exception, match="no such weights here" if cd.rank() == failing else "rank") as caught:
        make(cd.rank() == failing)
    assert isinstance(caught.value, cd.RefusedError) == (cd.rank() != failing)
    assert time.monotonic() - began < HEARD_SECONDS
    assert cd.allreduce(torch.ones(1), op=cd.Sum) == cd.size()


@ranks(2)
def case_a_model_that_cannot_be_captured_on_one_rank() -> None:
    def build(example: torch.Tensor | None, fails: bool) -> cd.Pipeline:
        config = cd.PipelineConfig(microbatches=2, split="layers")
        return cd.Pipeline(Branching(fails), config, optimizer=sgd, loss=functional.mse_loss, example=example)

    for failing in range(cd.size()):
        for example in (None, torch.ones(4, 4)):
            refused_on(failing, functools.partial(build, example))
            refused_on(failing, lambda fails: made(lambda: Branching(fails)))


@ranks(2)
def case_a_builder_that_raises_on_one_rank() -> None:
    def builder(fails: bool) -> nn.Module:
        if fails:
            raise OSError("no such weights here")
        return dense(4, 4, 4)

    for failing in range(cd.size()):
        refused_on(failing, lambda fails: made(functools.partial(builder, fails)))
        refused_on(failing, lambda fails: made(functools.partial(builder, fails), data_parallel=2))
