"""One scale for a rank's optimizers, whatever they have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from coordd_torch.pipeline.scaling import Scaling


@pytest.fixture
def scaler():
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


def step(scaling, optimizers, *, finite):
    scaling.unscale(optimizers)
    scaling.update(finite=finite)


def test_gradients_are_those_of_the_loss_without_a_scale(scaler):
    weight = nn.Parameter(torch.ones(3))
    scaling = Scaling(scaler)
    scaling.scaled((weight * 5).sum()).backward()
    assert weight.grad.tolist() == [40.0] * 3
    step(scaling, [torch.optim.SGD([weight])], finite=True)
    assert weight.grad.tolist() == [5.0] * 3


def test_the_scale_is_that_of_all_ranks_also_where_there_are_no_gradients(scaler):
    scaling = Scaling(scaler)
    idle = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    scales = []
    for finite in (True, False, True, True):
        step(scaling, [idle], finite=finite)
        scales.append(scaling.scale)
    assert scales == [8.0, 4.0, 4.0, 8.0]


def test_what_this_rank_has_found_itself_counts_once(scaler):
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), math.inf)
    scaling = Scaling(scaler)
    step(scaling, [torch.optim.SGD([weight])], finite=False)
    assert scaling.scale == 4.0


def test_a_scaler_may_be_disabled():
    scaling = Scaling(torch.amp.GradScaler("cpu", enabled=False))
    weight = nn.Parameter(torch.ones(3))
    scaling.scaled((weight * 5).sum()).backward()
    step(scaling, [torch.optim.SGD([weight])], finite=True)
    assert weight.grad.tolist() == [5.0] * 3
    assert scaling.scale == 1.0
