from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coordd_torch.pipeline.capture import capture, stage
from tests.torch_pipeline.captures import assert_same, assert_whole, forward, step


class Wired(nn.Module):
    """Each layer reads some of what the earlier ones gave; some layers share their weights."""

    def __init__(self, wires, shared):
        super().__init__()
        self.wires = wires
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in wires)
        for layer in shared:
            self.layers[layer].weight = self.layers[0].weight

    def forward(self, x):
        values = [x]
        for layer, wires in zip(self.layers, self.wires, strict=True):
            values.append(layer(sum(values[wire] for wire in wires)).tanh())
        return values[-1] + values[len(values) // 2]


@st.composite
def models(draw):
    count = draw(st.integers(1, 7))
    wires = [draw(st.lists(st.integers(0, index), min_size=1, max_size=3)) for index in range(count)]
    return Wired(wires, draw(st.sets(st.integers(0, count - 1))))


@settings(max_examples=25, deadline=None)
@given(model=models(), data=st.data())
def test_any_cuts_of_any_graph_do_what_the_model_does(model, data):
    captured = capture(model.double())
    count = len(captured.layers)
    borders = sorted({0, count, *data.draw(st.lists(st.integers(1, count), max_size=4))})
    stages = [stage(captured, first, last - 1) for first, last in itertools.pairwise(borders)]
    assert_whole(model, stages)
    batch = torch.randn(3, 2, dtype=torch.float64)
    assert_same(*step(model, captured, stages, batch, torch.sum), tolerance=1e-12)


def test_what_nobody_reads_later_is_not_given():
    captured = capture(Wired([[0], [1], [2], [1, 3]], set()))
    gives = [set(captured.interface(layer, layer).writes) for layer in range(4)]
    reads = [set(captured.interface(layer, layer).reads) for layer in range(4)]
    assert gives[0] | gives[1] | gives[2] == reads[1] | reads[2] | reads[3]
    assert gives[0] - reads[1] <= reads[2] | reads[3]
    assert not gives[3]
    assert set(captured.interface(1, 3).reads) == gives[0]
    assert captured.interface(0, 3).reads == captured.interface(0, 3).writes == ()
    stages = [stage(captured, 0, 0), stage(captured, 1, 3)]
    passes = forward(stages, captured.inputs(torch.ones(2, 2)))
    assert set(passes[0][1]) == gives[0]


class Named(nn.Module):
    """Has layers that are called what inputs and results are called."""

    def __init__(self):
        super().__init__()
        self.mask, self.output, self.head = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x, mask=None):
        gate = self.mask(x)
        x = self.output(x).tanh()
        return self.head(x * gate if mask is None else x * gate * mask)


def test_layers_may_be_called_what_inputs_and_results_are_called():
    model = Named()
    captured = capture(model)
    stages = [stage(captured, layer, layer) for layer in range(3)]
    x = torch.randn(3, 2)
    for batch in ({"x": x}, {"x": x, "mask": x > 0}, {"x": x}):
        assert_same(*step(model, captured, stages, batch, torch.sum))
