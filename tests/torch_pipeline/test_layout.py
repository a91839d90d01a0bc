"""Which layers make which stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd.errors import ArgumentError
from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.layout import Layout


def layout(model, stages, **settings):
    return Layout.of(capture(model), stages, cd.PipelineConfig(**settings))


def line(*widths):
    return nn.Sequential(*(nn.Linear(width, width) for width in widths))


def test_the_largest_stage_is_as_small_as_can_be():
    model = line(8, 1, 1, 1, 1)
    assert layout(model, 2, split="parameters").spans == (range(1), range(1, 5))
    assert layout(model, 2, split="layers").spans == (range(3), range(3, 5))


def test_or_it_is_as_the_user_says():
    assert layout(line(1, 1, 1), 2, layers_per_proc=[1, 2]).spans == (range(1), range(1, 3))
    with pytest.raises(ArgumentError, match="4"):
        layout(line(1, 1, 1), 2, layers_per_proc=[2, 2])
    with pytest.raises(ArgumentError, match="4 stages need 4 layers"):
        layout(line(1, 1, 1), 4)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))
        self.third.weight = self.first.weight

    def forward(self, x):
        one = self.first(x)
        two = self.second(one)
        return self.third(one + two)


def test_flows_ties_and_routes_are_those_of_the_model():
    made = layout(Skip(), 3, layers_per_proc=[1, 1, 1])
    assert made.tied == {"first.weight": (0, 2)}
    inputs = made.captured.inputs(torch.ones(1, 2))
    flows = made.flows([inputs], training=True)
    assert flows == ((0, 1), (1, 2))  # what lies between layers goes with the one before
    for stage in range(2):
        for taker, names in made.route(stage, inputs, flows, training=True).items():
            assert (stage, taker) in flows
            assert names


def test_a_circle_is_not_cut():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.again, self.between = nn.Linear(2, 2), nn.Linear(2, 2)
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.again(self.between(self.again(x))))

    with pytest.raises(ArgumentError, match="again"):
        layout(Twice(), 2, layers_per_proc=[1, 3])
    assert layout(Twice(), 2).spans == (range(3), range(3, 4))


class Detour(nn.Module):
    """Has a skip in one mode only, or for one kind of input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x, scale=None):
        first = self.layers[0](x)
        x = self.layers[2](self.layers[1](first))
        if not self.training or scale is not None:
            x = x + first
        return self.layers[3](x)


def test_flows_are_those_of_the_inputs_and_the_mode():
    made = layout(Detour(), 3, layers_per_proc=[1, 1, 2])
    plain, scaled = (made.captured.inputs(batch) for batch in ({"x": torch.ones(1, 2)}, (torch.ones(1, 2), 2.0)))
    assert made.flows([plain], training=True) == ((0, 1), (1, 2))
    assert made.flows([plain], training=False) == ((0, 1), (0, 2), (1, 2))
    assert made.flows([plain, scaled], training=True) == ((0, 1), (0, 2), (1, 2))
