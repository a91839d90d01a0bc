from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from coordd_torch.pipeline.batch_norms import tracking
from coordd_torch.pipeline.capture import capture
from tests.torch_pipeline.captures import assert_same, cut, step


class Added(nn.BatchNorm1d):
    """Does more than to normalise."""

    def forward(self, x):
        return super().forward(x) + 1


class Exported(nn.Module):
    """Has a branch that torch.fx cannot follow, and torch.export can."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.added = nn.BatchNorm1d(4), nn.BatchNorm1d(4), Added(4)
        self.bare = nn.BatchNorm1d(4, track_running_stats=False)
        self.frozen.eval()
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        if x.dim() != 2:
            raise ValueError
        return self.last(self.bare(self.added(self.frozen(self.first(x)))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Exported().double()


def test_only_what_does_nothing_but_normalise_is_put_back(model):
    captured = capture(model, torch.randn(5, 4, dtype=torch.double))
    assert captured.way == "export"
    assert tracking(model) == {"first"}
    for training in (True, False):
        trace = captured.traces.find(captured.inputs(torch.randn(3, 4, dtype=torch.double)), training=training)
        called = [node.target for node in trace.graph.nodes if node.op == "call_module"]
        assert called == ["first"]
        assert not any("first.num_batches" in str(node.target) for node in trace.graph.nodes)


def test_values_gradients_and_statistics_are_those_of_the_model(model):
    batch = torch.randn(5, 4, dtype=torch.double)
    captured = capture(model, batch)
    frozen = copy.deepcopy(model.frozen.state_dict())
    stages = cut(captured, 2)
    assert_same(*step(model, captured, stages, batch, torch.sum), tolerance=1e-12)
    assert all(torch.equal(value, frozen[name]) for name, value in model.frozen.state_dict().items())
    for each in (model, *stages):
        each.eval()
    assert_same(*step(model, captured, stages, batch, torch.sum), tolerance=1e-12)


def test_instance_normalisation_is_put_back_too():
    class Instances(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(5, 2)

        def forward(self, x):
            if x.dim() != 3:
                raise ValueError
            return self.last(self.norm(x))

    model, batch = Instances().double(), torch.randn(3, 4, 5, dtype=torch.double)
    captured = capture(model, batch)
    assert captured.way == "export"
    assert [node.target for node in captured.traces.first.graph.nodes if node.op == "call_module"] == ["norm"]
    assert_same(*step(model, captured, cut(captured, 2), batch, torch.sum), tolerance=1e-12)


def test_what_is_added_to_a_result_in_place_does_not_join_layers():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

        def forward(self, x):
            if x.dim() != 2:
                raise ValueError
            for block in self.blocks:
                shortcut = x
                x = block(x)
                x += shortcut
            return x

    captured = capture(Residual(), torch.randn(5, 4))
    assert captured.way == "export"
    assert [name for name, _ in captured.layers] == ["blocks.0", "blocks.1", "blocks.2"]
