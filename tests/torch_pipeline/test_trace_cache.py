from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.failure import CaptureError
from tests.torch_pipeline.captures import assert_same, cut, forward, step
from tests.torch_pipeline.models import Guarded, ResNet, Stations


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_a_new_trace_is_made_only_for_what_the_others_do_not_hold_for():
    model = Guarded()
    captured = capture(model, torch.randn(4, 4))
    stages = cut(captured, 2)
    for size in (4, 3, 9):
        assert_same(*step(model, captured, stages, torch.randn(size, 4), lambda out: out[0].sum()), tolerance=1e-6)
    assert len(captured.traces.found) == 1
    batch = {"x": torch.randn(3, 4), "shift": 2}
    assert_same(*step(model, captured, stages, batch, lambda out: out[0].sum()), tolerance=1e-6)
    assert len(captured.traces.found) == 2
    for each in (model, *stages):
        each.eval()
    assert_same(*step(model, captured, stages, torch.randn(1, 4), lambda out: out[0].sum()), tolerance=1e-6)
    assert len(captured.traces.found) == 3


def test_layers_that_are_left_whole_know_their_mode_by_themselves():
    model = ResNet()
    captured = capture(model, torch.randn(3, 2, 7, 7))
    stages = cut(captured, 2)
    for each in (model, *stages):
        each.eval()
    forward(stages, captured.inputs(torch.randn(2, 2, 7, 7)))
    assert len(captured.traces.found) == 1


def test_stages_make_new_traces_when_the_model_is_gone():
    model = Guarded()
    captured = capture(model, torch.randn(4, 4))
    stages = cut(captured, 2)
    inputs = captured.inputs(torch.randn(1, 4))
    gone = weakref.ref(model.blocks[0])
    wanted = model.eval()(torch.randn(1, 4))[0].shape
    del model, captured
    gc.collect()
    assert gone() is None
    for each in stages:
        each.eval()
    assert forward(stages, inputs)[-1][1]["output"][0].shape == wanted


@pytest.mark.parametrize("make", [ResNet, lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))])
def test_a_stage_keeps_nothing_of_the_others(make):
    model = make()
    captured = capture(model)
    stage = cut(captured, 2)[0]
    others = [weakref.ref(each) for each in model.parameters() if each not in set(stage.parameters())]
    assert others
    del model, captured
    gc.collect()
    assert not any(other() is not None for other in others)


def test_layers_may_look_at_their_data():
    class Picky(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if float(x.detach().sum()) > 0 else 3)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Picky(3, 3) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    captured = capture(model, torch.ones(2, 3))
    assert captured.way == "fx"
    for batch in (torch.ones(2, 3), -torch.ones(3, 3)):
        assert_same(*step(model, captured, cut(captured, 2), batch, torch.sum))


class Writer(nn.Module):
    """A layer that writes to what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        x += self.linear(x.clone())
        return x.tanh()


class Written(nn.Module):
    def __init__(self, late):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = nn.ModuleList([Writer(), nn.Linear(3, 3), nn.Linear(3, 3)])
        self.late = late

    def forward(self, x):
        x = self.first(x)
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + y if self.late else y


@pytest.mark.parametrize("late", [False, True])
def test_what_a_layer_writes_in_place_is_seen_by_those_who_read_it_later(late):
    model = Written(late)
    captured = capture(model, torch.ones(2, 3))
    assert len(captured.layers) == (1 if late else 4)
    stages = cut(captured, 1 if late else 4)
    for _ in range(3):
        assert_same(*step(model, captured, stages, torch.randn(2, 3), torch.sum))


def test_what_a_stage_receives_is_never_written_to():
    captured = capture(Written(late=False), torch.ones(2, 3))
    stages = cut(captured, 4)
    for _ in range(3):
        for received, _given in forward(stages, captured.inputs(torch.randn(2, 3))):
            assert all(value._version == 0 for value in received.values())


@pytest.mark.parametrize("chain", [False, True])
def test_a_layer_may_write_to_the_input_of_which_microbatches_are_parts(chain):
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x.mul_(2))

    model = nn.Sequential(Doubled(), nn.Tanh()) if chain else Doubled()
    captured = capture(model, torch.ones(2, 3))
    (stage,), x = cut(captured, 1), torch.randn(6, 3)
    given = x.clone()
    outputs = [stage(captured.inputs(part))["output"] for part in given.chunk(3)]
    assert torch.equal(given, x)
    for output in outputs:
        output.sum().backward()
    found = [parameter.grad for parameter in stage.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


def test_arguments_that_are_no_tensors_may_change():
    model = Stations()
    captured = capture(model, {"batch": {"image": torch.ones(2, 5)}, "times": 2})
    stages = cut(captured, 2)
    for batch in ({"times": 2}, {"times": 3, "scale": torch.ones(4, 1)}, {"times": 0}, {}):
        given = {"batch": {"image": torch.randn(4, 5)}, **batch}
        assert_same(*step(model, captured, stages, given, lambda out: out["logits"].sum()), tolerance=1e-6)


class Scaled(nn.Module):
    """Its float may stay open if it only multiplies."""

    def __init__(self, *, decides):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.decides = decides

    def forward(self, x, scale):
        if self.decides and scale > 2:
            x = -x
        return self.layers[1](self.layers[0](x) * scale)


@pytest.mark.parametrize(("decides", "count"), [(False, 1), (True, 5)])
def test_a_float_that_changes_needs_no_new_trace_unless_it_decides(decides, count):
    model = Scaled(decides=decides)
    captured = capture(model, {"x": torch.ones(2, 3), "scale": 0.5})
    stages = cut(captured, 2)
    for scale in (0.5, 1.0, 2.0, 3.0, 4.0):
        assert_same(*step(model, captured, stages, {"x": torch.randn(2, 3), "scale": scale}, torch.sum), tolerance=1e-6)
    assert len(captured.traces.found) == count


def test_what_is_remembered_of_changing_inputs_is_bounded(monkeypatch):
    monkeypatch.setattr("coordd_torch.pipeline.trace_cache.KEPT", 3)
    model = Scaled(decides=True)
    captured = capture(model, {"x": torch.ones(2, 3), "scale": 0.0})
    stages = cut(captured, 2)
    for scale in (1.0, 2.0, 3.0, 4.0, 1.0):
        assert_same(*step(model, captured, stages, {"x": torch.randn(2, 3), "scale": scale}, torch.sum), tolerance=1e-6)
    assert len(captured.traces.found) == 3
    assert captured.traces.found[0] is captured.traces.first


class Sorts(nn.Module):
    """Does something else for a tensor than for what stands for one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        x = self.layers[1](self.layers[0](x))
        return x * 2 if isinstance(x, torch.Tensor) else x


def test_without_an_example_the_first_batch_is_the_trial():
    captured = capture(Sorts())
    with pytest.raises(CaptureError, match=r"the model calls aten::mul.* where its trace calls None"):
        captured.traces.find(captured.inputs(torch.ones(2, 3)), training=True)
