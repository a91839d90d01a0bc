"""Gradients on their way into a step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from coordd import api
from coordd_torch.pipeline.gradient_finalisation import Settling
from coordd_torch.pipeline.scaling import Scaling
from tests.local_ranks import local_ranks


class Rank:
    """Two parameters with gradients of one value: one that it counts, and one that the other rank does."""

    def __init__(self, value, *, clip_norm=None, scaler=None):
        self.mine, self.other = (nn.Parameter(torch.ones(1)) for _ in range(2))
        self.mine.grad, self.other.grad = torch.full((1,), value), torch.full((1,), value)
        self.completed = 0
        self.settling = Settling(
            self._complete,
            [self.mine, nn.Parameter(torch.ones(1))],
            [self.other],
            optimizers=[torch.optim.SGD([self.mine, self.other])],
            clip_norm=clip_norm,
            scaling=scaler and Scaling(scaler),
            operations=api.operations(),
            name="norm",
        )
        self.settling.begin()

    def _complete(self):
        self.completed += 1


def settled(values, **options):
    """Settles the gradients of two ranks twice, as two stages would; returns what each made of it."""

    def body(rank):
        made = Rank(values[rank], **{key: make() if callable(make) else make for key, make in options.items()})
        steps = [made.settling.settle() for _ in range(2)]
        assert made.completed == 2
        return steps, made.mine.grad.item(), made.other.grad.item()

    with local_ranks(2) as ranks:
        return ranks.each(body)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=10.0)


def test_without_a_wish_gradients_stay_as_they_are():
    assert settled([3.0, math.inf]) == [([True, True], 3.0, 3.0), ([True, True], math.inf, math.inf)]


def test_all_are_clipped_by_the_norm_of_those_that_are_counted():
    for (steps, mine, other), value in zip(settled([3.0, 4.0], clip_norm=0.5), (0.3, 0.4), strict=True):
        assert steps == [True, True]
        assert (mine, other) == (pytest.approx(value, rel=1e-5), pytest.approx(value, rel=1e-5))


def test_they_are_clipped_without_the_scale_of_the_loss():
    for (steps, mine, _), value in zip(settled([30.0, 40.0], clip_norm=2.5, scaler=scaler), (1.5, 2.0), strict=True):
        assert steps == [True, True]
        assert mine == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_stops_both(value):
    assert [steps for steps, *_ in settled([3.0, value], scaler=scaler)] == [[False, False]] * 2
