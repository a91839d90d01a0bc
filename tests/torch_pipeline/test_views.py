"""Tensors that share memory on one side of a cut only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd.pipeline.frame import unpack
from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.capture import capture, stage
from coordd_torch.pipeline.views import ALIASED, aliased
from tests.torch_pipeline.stages import CODEC


def test_overlaps_are_found_within_and_between_values():
    h, other = torch.zeros(4, 6), torch.zeros(3)
    values = {"a": (h, other), "b": {"same": h, "rows": h[:2], "more": torch.ones(2)}, "c": other}
    assert aliased(values) == {"a" + ALIASED: (0,), "b" + ALIASED: (0, 1)}


@pytest.mark.parametrize(
    "values",
    [
        {"a": torch.zeros(4).expand(3, 4), "b": torch.zeros(4)},
        {"a": list(torch.zeros(4, 6).split(2))},
        {"a": torch.zeros(0), "b": torch.zeros(0), "c": 3, "d": torch.eye(3).to_sparse()},
        {},
    ],
)
def test_what_lies_apart_is_not_aliased(values):
    assert aliased(values) == {}


@pytest.mark.parametrize(("start", "end"), [((0, 9), (9, 10)), ((0, 3), (8, 9))])
def test_neighbours_do_not_overlap(start, end):
    memory = torch.zeros(10)
    assert aliased({"a": memory[slice(*start)], "b": memory[slice(*end)]}) == {}


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        h = self.linear(x) * 1
        return h, h.view(-1, 2, 3), h + 1


class Writes(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, given):
        if self.place is not None:
            given[self.place].relu_()
        return given[0].sum() + given[1].sum() + given[2].sum()


def passed(place, recompute=False):
    model = nn.Sequential(Views(), Writes(place))
    captured = capture(model)
    first, last = (Boundary(stage(captured, number, number), recompute=recompute) for number in range(2))
    inputs = captured.inputs(torch.randn(4, 6))
    for number in range(2):
        first.forward(number, {}, inputs)
        frame = first.frames(number, {1: stage(captured, 0, 0).writes})[1]
        last.forward(number, {0: unpack(frame, CODEC)}, inputs)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_writing_to_one_of_several_views_is_refused(place, recompute):
    with pytest.raises(ArgumentError, match=r"layers 1 to 1 write in place to '.*', which shares memory with"):
        passed(place, recompute)


@pytest.mark.parametrize("place", [None, 2])
def test_views_that_nobody_writes_to_are_fine(place):
    passed(place)
