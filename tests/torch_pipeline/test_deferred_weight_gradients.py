"""Layers that put the gradients of their weights off."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.deferred_weight_gradients import Ledger
from tests.torch_pipeline.stages import Stage

LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6)),
    "linear, of sequences": (lambda: nn.Linear(6, 4, bias=False), (2, 5, 6)),
    "linear, of one row": (lambda: nn.Linear(6, 4), (6,)),
    "convolution": (lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), (3, 4, 9)),
    "convolution of images": (lambda: nn.Conv2d(2, 3, (3, 1), padding=(2, 0), dilation=2), (3, 2, 7, 5)),
    "convolution of one image": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 5, 5)),
    "convolution of volumes": (lambda: nn.Conv3d(1, 2, 2, bias=False), (2, 1, 4, 3, 4)),
}


pytestmark = pytest.mark.usefixtures("exact")


def boundary(layer):
    return Boundary(Stage(layer, ["x"], ["y"]), split=True)


def entering(stage, number, x):
    """Takes a microbatch of another stage forward, and as far back as that waits for; returns its gradient."""
    x = x.clone().requires_grad_()
    output = stage.forward(number, {1: ({"x": x}, [x])}, {})["y"]
    ((found,),) = stage.backward_input(number, (output * torch.arange(output.numel()).view_as(output)).sum()).values()
    return found


def reference(layer, x):
    """The gradients that one pass finds, which are taken off."""
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * torch.arange(output.numel()).view_as(output)).sum().backward()
    return x.grad, taken(layer)


def taken(layer):
    found = [None if each.grad is None else each.grad.clone() for each in layer.parameters()]
    layer.zero_grad()
    return found


def near(left, right):
    torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_get_their_gradients_later_and_inputs_at_once(name):
    build, shape = LAYERS[name]
    layer, xs = build(), [torch.randn(shape) for _ in range(3)]
    wanted = [reference(layer, x) for x in xs]
    stage = boundary(layer)
    for number, (x, (inner, _)) in enumerate(zip(xs, wanted, strict=True)):
        near(entering(stage, number, x), inner)
    assert all(parameter.grad is None for parameter in layer.parameters())
    for number in range(3):
        stage.backward_weight(number)
    near(taken(layer), [sum(found) for found in zip(*(found for _, found in wanted), strict=True)])


def test_a_frozen_bias_gets_none():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    stage = boundary(layer)
    entering(stage, 0, torch.randn(4, 3))
    stage.backward_weight(0)
    assert layer.weight.grad is not None
    assert layer.bias.grad is None


def test_who_watches_gradients_come_sees_them_come():
    seen = []
    layer = nn.Linear(3, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    x = torch.randn(4, 3)
    _, (wanted, _) = reference(layer, x)
    seen.clear()
    stage = boundary(layer)
    entering(stage, 0, x)
    near(seen, [wanted])
    stage.backward_weight(0)
    near(layer.weight.grad, wanted)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_are_computed_lead_to_what_is_trained():
    layer = nn.utils.weight_norm(nn.Linear(5, 4))
    x = torch.randn(3, 5)
    inner, wanted = reference(layer, x)
    stage = boundary(layer)
    near(entering(stage, 0, x), inner)
    stage.backward_weight(0)
    assert len(wanted) == 3
    near(taken(layer), wanted)


class Odd(nn.Linear):
    """Is not what its parent is."""

    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("layer", "suffices"),
    [
        (nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)), True),
        (nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)), True),
        (nn.Conv2d(1, 3, 3, padding="same"), False),
        (nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular"), False),
        (Odd(3, 3), False),
        (nn.Sequential(nn.Linear(3, 3), Odd(4, 4)), False),
        (nn.Sequential(nn.Linear(3, 3), Odd(4, 4).requires_grad_(False)), True),
        (nn.ReLU(), False),
    ],
)
def test_it_is_for_stages_of_which_it_knows_most(layer, suffices):
    assert Ledger(layer).suffices is suffices


def test_what_it_does_not_know_is_done_at_once():
    layer = nn.Sequential(nn.Linear(4, 4), Odd(4, 2))
    x = torch.randn(5, 4)
    _, wanted = reference(layer, x)
    stage = boundary(layer)
    entering(stage, 0, x)
    near([each.grad for each in layer.parameters()], [None, None, *wanted[2:]])
    stage.backward_weight(0)
    near(taken(layer), wanted)


class Force(nn.Module):
    """The gradient of an energy, as a layer."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(6, 6)

    def forward(self, x):
        place = x if x.requires_grad else x.detach().requires_grad_()
        return x + torch.autograd.grad(self.energy(place).square().sum(), place, create_graph=True)[0]


def test_gradients_of_gradients_are_right():
    layer, x = nn.Sequential(Force(), nn.Linear(6, 6)), torch.randn(5, 6)
    inner, wanted = reference(layer, x)
    stage = boundary(layer)
    near(entering(stage, 0, x), inner)
    stage.backward_weight(0)
    near(taken(layer), wanted)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_computed_anew_once(reentrant):
    layer, x, runs = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(5, 4), []
    inner, wanted = reference(layer, x)
    layer[1].register_forward_hook(lambda *_: runs.append(1))

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x):
            return checkpoint(layer, x, use_reentrant=reentrant)

    stage = boundary(Wrapped())
    near(entering(stage, 0, x), inner)
    assert all(parameter.grad is None for parameter in layer.parameters())
    stage.backward_weight(0)
    near(taken(layer), wanted)
    assert len(runs) == 2
    assert stage.undivided == 0


def test_what_is_compiled_is_done_at_once():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(5, 4)
    inner, wanted = reference(layer, x)
    stage = boundary(torch.compile(layer, backend="aot_eager"))
    for number in (0, 1):
        near(entering(stage, number, x), inner)
        stage.backward_weight(number)
        near(taken(layer), wanted)


def test_under_autocast_it_computes_as_lowly():
    torch.set_default_dtype(torch.float32)
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        inner, wanted = reference(layer, x)
        stage = boundary(layer)
        found = entering(stage, 0, x)
    stage.backward_weight(0)
    assert torch.equal(found, inner)
    assert all(map(torch.equal, taken(layer), wanted))


def test_between_the_halves_only_factors_are_kept():
    class Noting(nn.Module):
        def forward(self, x):
            found = x.exp()
            self.memory = weakref.ref(found)
            return found.sin()

    inside = Noting()
    stage = boundary(nn.Sequential(nn.Linear(4, 4), inside, nn.Linear(4, 4)))
    entering(stage, 0, torch.randn(5, 4))
    gc.collect()
    assert inside.memory() is None
    stage.backward_weight(0)


def test_layers_are_themselves_again_whatever_happens():
    layer = nn.Linear(4, 4)
    stage = boundary(layer)
    with pytest.raises(RuntimeError):
        entering(stage, 0, torch.randn(5, 7))
    assert "forward" not in vars(layer)
    entering(stage, 1, torch.randn(5, 4))
    assert "forward" not in vars(layer)
