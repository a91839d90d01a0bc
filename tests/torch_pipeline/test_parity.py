"""Gradients in one piece, and how far others are from them."""

from __future__ import annotations

import math

import torch
from torch import nn

from coordd.pipeline.microbatch import cut
from coordd_torch.pipeline.batch import Batch
from coordd_torch.pipeline.parity import distance, gradients


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)
        self.idle = nn.Parameter(torch.ones(1))

    def forward(self, values):
        return self.linear(values["x"])


def test_microbatches_add_up_to_the_batch_and_those_without_weight_are_left_out():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weights = iter([1.0, 0.0, 3.0])
    batch = Batch(x, x, cut(3, 3), named=lambda part: {"x": part}, weigh=lambda *_: next(weights))
    found = gradients(Whole(), batch, lambda y, x: y.mean() * (math.nan if x[0, 0] == 3 else 1))
    assert found["linear.weight"].tolist() == [[4.0, 5.0]]
    assert found["idle"] is None


def test_the_distance_is_the_largest_of_those_named():
    others = {"a": torch.ones(2), "b": None, "c": torch.ones(1), "d": torch.full((1,), 9.0), "e": torch.ones(0)}
    assert distance({}, others) == 0.0
    assert distance({"a": torch.tensor([1.0, 3.0]), "b": None, "e": torch.ones(0)}, others) == 2.0
    assert distance({"b": torch.tensor([-4.0]), "c": None}, others) == 4.0
