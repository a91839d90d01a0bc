"""What usual models and settings need of a capture, one by one, without the libraries that have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd.pipeline.config import PipelineConfig
from coordd_torch.pipeline.build import materialise, outline
from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.layout import Layout
from coordd_torch.pipeline.rows import joined
from coordd_torch.pipeline.stage import check_step
from tests.torch_pipeline.captures import assert_same, backward, cut, forward, step, taken


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


class Constant(Blocks):
    """Only torch.export can trace it, and the graph has a constant of its own."""

    def forward(self, x):
        if x.ndim == 3:
            x = x.sum(1)
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Cache:
    """No value that can be traced."""


class Caching(Blocks):
    """Returns a cache unless it is told not to, like the decoders of `transformers`."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x, use_cache=None):
        if x.ndim == 3:
            x = x.sum(1)
        x = super().forward(x)
        return x, Cache() if use_cache is not False else None


class Wrapped(nn.Module):
    """Hands on what it is given, like the models of `peft`."""

    def __init__(self):
        super().__init__()
        self.base = Caching()

    @property
    def config(self):
        return self.base.config

    def forward(self, x, **kwargs):
        return self.base(x, **kwargs)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        out, state = self.lstm(self.first(x))
        return self.last(out), state


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_first_batch_may_come_under_autocast(dtype, example):
    x = torch.randn(4, 4)
    model = Blocks()
    captured = capture(model, x) if example else capture(model)
    stages = cut(captured, 3)
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            wanted = model(x)
            passes = forward(stages, captured.inputs(x))
        output = passes[-1][1]["output"]
        assert output.dtype == wanted.dtype == dtype
        wanted.float().sum().backward()
        gradients = taken(model)
        backward(passes, output.float().sum())
        torch.testing.assert_close(taken(model), gradients)


def test_a_trace_that_is_made_under_autocast_holds_without_it():
    model = Constant()
    captured = capture(model, torch.randn(4, 4))
    stages = cut(captured, 3)
    for each in (model, *stages):
        each.eval()
    with torch.autocast("cpu", torch.bfloat16):
        forward(stages, captured.inputs(torch.randn(4, 4)))
    x = torch.randn(4, 4)
    assert forward(stages, captured.inputs(x))[-1][1]["output"].dtype == torch.float32
    assert_same(*step(model, captured, stages, x, torch.sum), tolerance=1e-6)


@pytest.mark.parametrize("make", [Caching, Wrapped])
def test_no_cache_is_asked_for(make):
    model = make()
    captured = capture(model, {"x": torch.randn(4, 4)})
    stages = cut(captured, 3)
    batch = {"x": torch.randn(3, 4), "use_cache": False}
    assert_same(*step(model, captured, stages, batch, lambda out: out[0].sum()), tolerance=1e-6)
    output = forward(stages, captured.inputs({"x": torch.randn(3, 4)}))[-1][1]["output"]
    assert output[1] is None
    with pytest.raises(ArgumentError):  # it was asked for
        forward(stages, captured.inputs({"x": torch.randn(3, 4), "use_cache": True}))


def test_a_builder_makes_what_a_stage_needs_beside_the_constants_of_its_graph():
    def build():
        torch.manual_seed(3)
        return Constant()

    captured = capture(outline(build), torch.randn(4, 4))
    assert captured.way == "export"
    layout = Layout.of(captured, 3, PipelineConfig(split="layers"))
    names = [layout.names([stage]) for stage in range(3)]
    assert set().union(*names) == set(build().state_dict())
    stages = [layout.module(stage, materialise(build, names[stage])) for stage in range(3)]
    x = torch.randn(4, 4)
    torch.testing.assert_close(forward(stages, captured.inputs(x))[-1][1]["output"], build()(x))


def test_the_state_of_a_recurrent_layer_is_joined_by_its_rows():
    model, x = Recurrent(), torch.randn(4, 3, 4)
    captured = capture(model)
    stages = cut(captured, 3)
    assert_same(*step(model, captured, stages, x, lambda out: out[0].sum() + out[1][0].sum()), tolerance=1e-6)
    parts = [forward(stages, captured.inputs(x[part]))[-1][1]["output"] for part in (slice(0, 2), slice(2, 4))]
    found = joined(parts, [2, 2], captured.row_dimensions(x))
    assert captured.row_dimensions(x) == [0, 1, 1]  # two layers, two rows: sizes alone would not tell
    torch.testing.assert_close(found, model(x))


def test_what_has_no_dimension_of_rows_is_refused():
    with pytest.raises(ArgumentError, match=r"output\[1\] has shape \(2, 2\) for 2 rows, and no dimension"):
        joined([(torch.ones(2, 4), torch.ones(2, 2))] * 2, [2, 2], [0, None])


class Deciding(Blocks):
    """Reads its data, so that nothing is known without them."""

    def forward(self, x):
        return super().forward(x) if float(x.sum()) > 0 else x


def test_where_it_cannot_be_told_rows_come_first():
    model = nn.Sequential(Deciding(), nn.Linear(4, 4))
    assert capture(model).row_dimensions(torch.ones(2, 4)) is None
    torch.testing.assert_close(joined([torch.ones(2, 4)] * 2, [2, 2], None), torch.ones(4, 4))


def test_an_optimizer_that_needs_a_closure_is_refused():
    parameters = list(nn.Linear(2, 2).parameters())
    with pytest.raises(ArgumentError, match="LBFGS computes the loss several times in a step"):
        check_step(torch.optim.LBFGS(parameters))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Rprop):
        optimizer = kind(parameters, lr=0.1)
        check_step(optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        check_step(optimizer)


class Experts(nn.Module):
    """Calls those of its experts that the data choose, as `eager` experts of `transformers` are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Deciding() for _ in range(4))

    def forward(self, x):
        if x.ndim != 2:
            raise ValueError
        for layer in self.layers:
            x = layer(x)
        return x


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.head = Experts(), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.model(x))


def test_too_few_layers_are_refused_with_what_keeps_the_others_closed():
    captured = capture(Mixture(), torch.randn(2, 4))
    assert [name for name, _ in captured.layers] == ["model", "head"]
    with pytest.raises(ArgumentError) as caught:
        Layout.of(captured, 4, PipelineConfig(split="layers"))
    assert "4 stages need 4 layers" in str(caught.value)
    assert "Only its direct children are layers" in str(caught.value)
    assert "float(x.sum())" in str(caught.value)
    assert "grouped_mm" in str(caught.value)
