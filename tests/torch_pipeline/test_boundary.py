"""The ends of a stage's graph: as good as none."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from coordd.errors import ArgumentError
from coordd.pipeline.frame import unpack
from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.rng_and_autocast import seed_for, seeded
from tests.torch_pipeline.graphs import Dense
from tests.torch_pipeline.stages import CODEC, Line, Stage, same

WAYS = ["backward", "split"]


pytestmark = pytest.mark.usefixtures("exact")


class Skipping(nn.Module):
    """Gives a dictionary with what has no gradient, and a tuple with one tensor twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        h = self.linear(x)
        return {"h": h, "mask": h > 0, "n": 3, "none": None}, (h, x @ self.linear.weight)


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h):
        return nn.functional.gelu(self.linear(h["h"]) * h["mask"])


class End(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(6, 2)

    def forward(self, z, skip):
        return self.linear(self.drop(self.relu(z)) + skip[0] * skip[1])


def skipping(**options):
    stages = [
        Stage(Skipping(), ["x"], ["h", "skip"]),
        Stage(Middle(), ["h"], ["z"]),
        Stage(End(), ["z", "skip"], ["y"]),
    ]
    return Line(stages, {0: {1: ["h"], 2: ["skip"]}, 1: {2: ["z"]}}, **options)


def step(line, inputs, way, microbatch=0):
    loss = line.forward(microbatch, inputs)["y"].square().sum()
    line.backward(microbatch, loss, "backward" if way == "backward" else "backward_input")
    if way == "split":
        line.weight(microbatch)
    assert all(boundary.held == () for boundary in line.boundaries)
    return loss


def plain(line, inputs):
    loss = line.plain(inputs)["y"].square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recompute", [False, True])
def test_values_of_all_kinds_skips_and_dropout_give_the_gradients_of_the_plain_run(way, recompute):
    line = skipping(recompute=recompute, split=way == "split")
    inputs = {"x": torch.randn(5, 6)}
    torch.manual_seed(7)
    expected = plain(line, inputs)
    gradients = line.gradients()
    torch.manual_seed(7)
    assert torch.equal(step(line, inputs, way), expected)
    same(line.gradients(), gradients)
    assert sum(boundary.undivided for boundary in line.boundaries) == 0


@pytest.mark.parametrize("way", WAYS)
def test_many_microbatches_are_held_at_a_time_and_go_back_in_any_order(way):
    line = skipping(seed=1)
    batches = [{"x": torch.randn(rows, 6)} for rows in (2, 3, 1)]
    losses = [line.forward(number, inputs)["y"].sum() for number, inputs in enumerate(batches)]
    assert line.boundaries[1].held == (0, 1, 2)
    for number in (1, 2, 0):
        line.backward(number, losses[number], "backward" if way == "backward" else "backward_input")
    for number in (0, 1, 2) if way == "split" else ():
        line.weight(number)
    found = line.gradients()
    for number in (1, 2, 0) if way == "backward" else (0, 1, 2):
        values = dict(batches[number])
        for place, stage in enumerate(line.stages):
            with seeded(seed_for(1, 0, place, number), CODEC.device):
                values.update(stage(values))
        values["y"].sum().backward()
    same(found, line.gradients())


class Parts(nn.Module):
    """Gives two tensors of which the next stage uses one, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x), self.unused(x), self.used(x).detach()


@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_uses_has_no_gradient(way):
    sum_of_two = Stage(nn.Bilinear(3, 3, 1), ["a", "c"], ["y"])
    line = Line([Stage(Parts(), ["x"], ["a", "b", "c"]), sum_of_two], {0: {1: ["a", "b", "c"]}})
    step(line, {"x": torch.randn(4, 3)}, way)
    found = line.gradients()
    assert found["0.module.unused.weight"] is None
    assert found["0.module.used.weight"] is not None


def test_an_output_that_only_passes_through_has_the_gradient_of_its_consumers_together():
    line = Line(
        [
            Stage(nn.Linear(3, 3), ["x"], ["a"]),
            Stage(nn.Identity(), ["a"], ["b"]),
            Stage(nn.Bilinear(3, 3, 1), "ab", "y"),
        ],
        {0: {1: ["a"], 2: ["a"]}, 1: {2: ["b"]}},
    )
    inputs = {"x": torch.randn(4, 3)}
    plain(line, inputs)
    expected = line.gradients()
    step(line, inputs, "backward")
    same(line.gradients(), expected)


class Product(nn.Module):
    def forward(self, a, b):
        return a.sin() * b


def test_gradients_of_several_consumers_are_added_up_in_the_order_of_the_plain_run():
    stages = [Stage(nn.Linear(50, 50), ["x"], ["a"]), Stage(nn.Tanh(), ["a"], ["b"])]
    stages += [Stage(Product(), ["a", "b"], ["c"]), Stage(Product(), ["a", "c"], ["y"])]
    line = Line(stages, {0: {1: ["a"], 2: ["a"], 3: ["a"]}, 1: {2: ["b"]}, 2: {3: ["c"]}})
    inputs = {"x": torch.randn(50, 50)}
    plain(line, inputs)
    expected = line.gradients()
    step(line, inputs, "backward")
    same(line.gradients(), expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_was_sent_is_freed_if_the_graph_does_not_need_it(recompute):
    stage = Boundary(Stage(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["x"], ["y"]), recompute=recompute)
    outputs = stage.forward(0, {}, {"x": torch.randn(4, 3)})
    sent = weakref.ref(outputs["y"])
    storage = weakref.ref(outputs.pop("y").untyped_storage())
    frame = stage.frames(0, {1: ["y"]})[1]
    gc.collect()
    assert sent() is None
    assert storage() is None
    stage.backward(0, {1: [torch.ones(4, 3)]})
    assert unpack(frame, CODEC)[1][0].shape == (4, 3)


class Inside(nn.Module):
    """Remembers, without keeping it, an activation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        h = self.linear(x).exp()
        self.memory = weakref.ref(h.untyped_storage())
        return h.sin()


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_kept_unless_they_are_recomputed(recompute):
    inside = Inside()
    stage = Boundary(Stage(inside, ["x"], ["y"]), recompute=recompute)
    stage.forward(0, {}, {"x": torch.randn(4, 3)})
    stage.frames(0, {1: ["y"]})
    gc.collect()
    assert (inside.memory() is None) is recompute
    stage.backward(0, {1: [torch.ones(4, 3)]})
    gc.collect()
    assert inside.memory() is None


class Force(nn.Module):
    """The gradient of an energy, as a layer."""

    def __init__(self):
        super().__init__()
        self.energy = Dense(6, 6)

    def forward(self, x):
        place = x.detach().requires_grad_()
        return x + torch.autograd.grad(self.energy(place).square().sum(), place, create_graph=True)[0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_may_ask_for_gradients_of_its_own(recompute, split):
    line = Line(
        [Stage(Force(), ["x"], ["h"]), Stage(Force(), ["h"], ["y"])], {0: {1: ["h"]}}, recompute=recompute, split=split
    )
    inputs = {"x": torch.randn(5, 6)}
    expected = plain(line, inputs)
    gradients = line.gradients()
    assert torch.equal(step(line, inputs, "split" if split else "backward"), expected)
    same(line.gradients(), gradients)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_checkpoint_in_a_stage_counts_no_statistics_twice(recompute, way):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False)

    line = Line(
        [Stage(nn.Linear(6, 6), ["x"], ["h"]), Stage(Checkpointed(), ["h"], ["y"])],
        {0: {1: ["h"]}},
        recompute=recompute,
        split=way == "split",
    )
    step(line, {"x": torch.randn(5, 6)}, way)
    ((count, *_),) = line.boundaries[1].statistics.take().values()
    assert count == 5


def test_between_the_halves_of_a_backward_pass_only_what_the_second_needs_is_kept():
    for split in (False, True):
        inside = Inside()
        stage = Boundary(Stage(nn.Sequential(inside, nn.Linear(3, 3)), ["x"], ["y"]), split=split)
        x = torch.randn(4, 3, requires_grad=True)
        stage.forward(0, {1: ({"x": x}, [x])}, {})
        stage.frames(0, {1: ["y"]})
        stage.backward_input(0, {1: [torch.ones(4, 3)]})
        gc.collect()
        assert (inside.memory() is None) is split
        stage.backward_weight(0)
        assert inside.memory() is None


def test_a_layer_that_returns_something_else_the_second_time_is_noticed():
    class Changing(nn.Linear):
        def forward(self, values):
            y = super().forward(values["x"])
            self.times = getattr(self, "times", 0) + 1
            return {"y": [y] * self.times + [y * 2] * (self.times - 1)}

    stage = Boundary(Changing(3, 3), recompute=True)
    stage.forward(0, {}, {"x": torch.randn(4, 3)})
    stage.frames(0, {1: ["y"]})
    with pytest.raises(ArgumentError, match="stage 1 was sent 2 tensors, and has sent back gradients for 1"):
        stage.backward(0, {1: [torch.ones(4, 3)]})


def test_an_old_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.4.1"))
    with pytest.raises(ArgumentError, match=r"need PyTorch 2\.5 or newer, this is 2\.4\.1"):
        Boundary(nn.Linear(1, 1))


def test_only_outputs_are_wanted():
    stage = Boundary(Stage(nn.Linear(3, 3), ["x"], ["y"]))
    with torch.no_grad():
        stage.forward(0, {}, {"x": torch.randn(4, 3)})
        _, tensors = unpack(stage.frames(0, {1: ["y"]})[1], CODEC)
        assert stage.held == ()
        stage.forward(0, {}, {"x": torch.randn(4, 3)})
    assert not tensors[0].requires_grad
    stage.forget()
    assert stage.held == ()


def test_gradients_for_something_else_are_refused():
    stage = Boundary(Stage(nn.Linear(3, 3), ["x"], ["y"]), stage=0)
    stage.forward(0, {}, {"x": torch.randn(4, 3)})
    stage.frames(0, {1: ["y"]})
    with pytest.raises(ArgumentError, match="stage 1 was sent 1 tensors, and has sent back gradients for 2"):
        stage.backward(0, {1: [None, None]})


def test_activations_are_compressed_and_what_has_no_gradient_is_not():
    first = skipping(compress="int8").boundaries[0]
    sent = first.forward(0, {}, {"x": torch.randn(1000, 6)})["h"]
    frame = first.frames(0, {1: ["h"]})[1]
    assert len(frame) < 1000 * 6 * 2.2  # a byte for each value, one for each truth value
    found = unpack(frame, CODEC)[0]["h"]
    torch.testing.assert_close(found["h"], sent["h"], atol=sent["h"].abs().max().item() / 254, rtol=0)
    assert torch.equal(found["mask"], sent["mask"])


def test_with_a_seed_nothing_else_decides_what_is_drawn():
    line, inputs = skipping(seed=5), {"x": torch.randn(4, 6)}
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        found.append(step(line, inputs, "backward", microbatch=3).item())
        assert torch.equal(torch.get_rng_state(), state)
    assert found[0] == found[1]
    line.boundaries[2].step = 1
    assert step(line, inputs, "backward", microbatch=3).item() != found[0]


def test_recomputing_happens_under_the_same_autocast():
    torch.set_default_dtype(torch.float32)
    stage = Stage(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), ["x"], ["y"])
    inputs, gradients = {"x": torch.randn(4, 8)}, []
    for recompute in (False, True):
        boundary = Boundary(stage, recompute=recompute)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = boundary.forward(0, {}, inputs)["y"].float().sum()
        boundary.backward(0, loss)
        gradients.append([parameter.grad.numpy().copy() for parameter in stage.parameters()])
        stage.zero_grad()
    for left, right in zip(*gradients, strict=True):
        np.testing.assert_array_equal(left, right)


class Scaling(nn.Module):
    """Hands a row of a parameter of its own on, and one of a view of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scales = nn.Parameter(torch.ones(3, 6))

    def forward(self, x):
        return self.linear(x) * self.scales[0], self.scales[1], self.scales.unsqueeze(0).expand(5, -1, -1)[:, 2]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, h, scale, other):
        return self.linear(h * scale + other)


@pytest.mark.parametrize("recompute", [False, True])
def test_rows_of_parameters_travel_with_gradients_and_without(recompute):
    """A view of a parameter that is made without gradients says that it requires some."""
    names = ["h", "scale", "other"]
    stages = [Stage(Scaling(), ["x"], names), Stage(Scaled(), names, ["y"])]
    line = Line(stages, {0: {1: names}}, recompute=recompute)
    inputs = {"x": torch.randn(5, 6)}
    with torch.no_grad():
        torch.testing.assert_close(line.forward(0, inputs)["y"], line.plain(inputs)["y"])
    expected = plain(line, inputs)
    gradients = line.gradients()
    assert torch.equal(step(line, inputs, "backward"), expected)
    same(line.gradients(), gradients)
