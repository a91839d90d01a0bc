"""Gradients in one piece, and how far others are from them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from coordd_torch.pipeline.parity import distance, gradients


class Whole(nn.Module):
    """Writes to its input, and does not use all that it has."""

    def __init__(self, *, normed=False):
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)
        self.idle = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(2, affine=False) if normed else nn.Identity()

    def forward(self, x):
        return self.linear(self.norm(x.mul_(2)))


def found(model, loss, shares):
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0], [5.0, 6.0]])
    result = gradients(model, x, x.clone(), run=lambda whole, x: whole(x), loss=loss, shares=shares)
    assert x[0].tolist() == [1.0, 2.0]
    return result


THIRDS = [(slice(0, 1), 1 / 3), (slice(1, 3), 2 / 3)]


def test_a_model_gets_all_rows_at_a_time_so_a_loss_that_is_no_mean_is_seen():
    result = found(Whole(), lambda output, _: output.sum(), THIRDS)
    assert result["linear.weight"].tolist() == [[18.0, 26.0]]
    assert result["idle"] is None


def test_what_normalises_rows_by_each_other_gets_microbatches_and_those_without_weight_are_left_out():
    def loss(output, targets):
        assert len(targets) == 2
        return output.mul(targets[:, :1]).mean()

    model = Whole(normed=True)
    result = found(model, loss, [(slice(0, 1), 0.0), (slice(1, 3), 0.5)])
    assert result["linear.weight"].tolist() == [pytest.approx([0.5, 0.5], abs=1e-4)]


def test_the_distance_is_the_largest_of_those_named():
    others = {"a": torch.ones(2), "b": None, "c": torch.ones(1), "d": torch.full((1,), 9.0), "e": torch.ones(0)}
    assert distance({}, others) == 0.0
    assert distance({"a": torch.tensor([1.0, 3.0]), "b": None, "e": torch.ones(0)}, others) == 2.0
    assert distance({"b": torch.tensor([-4.0]), "c": None}, others) == 4.0


def test_what_is_no_number_is_far_from_all_that_is_one():
    nan, inf = math.nan, math.inf
    assert distance({"a": torch.tensor([nan, 1.0]), "b": torch.ones(1)}, {"a": torch.ones(2), "b": None}) == inf
    assert distance({"a": torch.tensor([nan, inf])}, {"a": torch.tensor([nan, inf])}) == 0.0
