"""What a trace could lose without a word: each model gives what it gives in one piece, or is refused with a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from coordd.errors import ArgumentError
from coordd_torch.pipeline.capture import capture
from tests.torch_pipeline.captures import assert_same, cut, forward, step


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for item in self.items:
            x = item(x)
        return x


class Outer(nn.Module):
    """Has a module that is traced through, and one that is a layer."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.last = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.last(self.inner(x))


class Exported(Outer):
    """torch.fx cannot trace this one."""

    def forward(self, x):
        if x.ndim != 2:
            raise ValueError
        return super().forward(x)


def chain():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


def doubled(_module, _given, output):
    return output * 2


def doubled_gradients(_module, gradients):
    return (gradients[0] * 2,)


def hooked(make, path, register, hook):
    def made():
        model = make()
        getattr(model.get_submodule(path), register)(hook)
        return model

    return made


def replaced(make, path):
    """Has another `forward` for one module, which refers to its old one."""

    def made():
        model = make()
        module = model.get_submodule(path)
        old = module.forward
        module.forward = lambda x: old(x) * 2
        return model

    return made


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Straight(Exported):
    def forward(self, x):
        return Rounded.apply(super().forward(x) * 5)


class Rounding(nn.Module):
    """Calls such a function on parts of what it gets."""

    def forward(self, x):
        return torch.cat([Rounded.apply(x[:, :2] * 5), x[:, 2:] * 2], 1)


class ScaledRounding(Rounding):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 5.0))

    def forward(self, x):
        return super().forward(x * self.scale)


class Roundings(Exported):
    """Calls one module with such a function twice in a row, and another one between layers."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = ScaledRounding(), Rounding()

    def forward(self, x):
        return self.once(super().forward(self.twice(self.twice(x))))


class SilentRounding(Exported):
    def __init__(self):
        super().__init__()
        self.rounding = Rounding()

    def forward(self, x):
        x = super().forward(x)
        with torch.no_grad():
            factor = self.rounding(x)
        return self.rounding(x) * factor


class Watched(Exported):
    def forward(self, x):
        x = super().forward(x)
        x.register_hook(lambda gradient: gradient * 2)
        return x * 1.5


class Averaging(Exported):
    """Writes to a buffer under `no_grad`, and nothing reads the result."""

    def forward(self, x):
        x = super().forward(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return x


class Counting(Exported):
    """What it writes to is read by a later layer."""

    def forward(self, x):
        with torch.no_grad():
            self.mean.add_(1)
        return super().forward(x) * self.mean


class Moved(Outer):
    def forward(self, x):
        x = super().forward(x)
        self.mean.data = self.mean * 0.9
        return x * self.mean


class MovedExported(Exported):
    def forward(self, x):
        x = super().forward(x)
        self.mean.data = self.mean * 0.9
        return x * self.mean


class Constants(Exported):
    """Other constants in other modes, also under `no_grad`."""

    def forward(self, x):
        with torch.no_grad():
            factor = x.abs() * 2 if self.training else x.abs() * 3
        shift = torch.tensor([1.0, 2.0, 3.0, 4.0]) if self.training else torch.tensor([5.0, 6.0, 7.0, 8.0])
        return super().forward(x) * factor + shift


SAME = {
    "hook of the model": hooked(Outer, "", "register_forward_hook", doubled),
    "hook of the model, exported": hooked(Exported, "", "register_forward_hook", doubled),
    "hook of a Sequential": hooked(chain, "", "register_forward_hook", doubled),
    "hook of a Sequential in a Sequential": hooked(chain, "1", "register_forward_hook", doubled),
    "backward hook of a Sequential": hooked(chain, "1", "register_full_backward_pre_hook", doubled_gradients),
    "hook of what is traced through": hooked(Outer, "inner", "register_forward_hook", doubled),
    "backward hook of a layer": hooked(Outer, "last", "register_full_backward_pre_hook", doubled_gradients),
    "a layer's own forward": replaced(Outer, "last"),
    "own forward of what has a list": replaced(Outer, "inner"),
    "a parametrized layer": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "a buffer written to": Averaging,
    "a buffer written to and read": Counting,
    "constants of a mode": Constants,
    "modules with a backward pass of their own": Roundings,
}

REFUSED = {
    "backward hook of the model": (
        hooked(Outer, "", "register_full_backward_pre_hook", doubled_gradients), "backward hooks of the model itself",
    ),
    "backward hook, exported": (
        hooked(Exported, "last", "register_full_backward_pre_hook", doubled_gradients), "backward hooks of 'last'",
    ),
    "the model's own forward": (replaced(Outer, ""), "replaced on the instance of the model itself"),
    "a Sequential's own forward": (replaced(chain, ""), "replaced on the instance of the model itself"),
    "own forward, exported": (replaced(Exported, "last"), "replaced on the instance of 'last'"),
    "a function with its own backward pass": (Straight, "backward pass of the torch.autograd.Function Rounded"),
    "a module with its own backward pass under no_grad": (SilentRounding, "'rounding' has a backward pass of its own"),
    "a hook on what forward computes": (Watched, "registers a hook on a tensor"),
    "assignment to data": (Moved, "data = ...` would be lost"),
    "assignment to data, exported": (MovedExported, "assigns to `tensor.data`"),
    "a module that cannot be copied": (
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)), "cannot be copied",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_nothing_is_lost(name):
    torch.manual_seed(0)
    model = SAME[name]()
    captured = capture(model, torch.randn(3, 4))
    stages = cut(captured, min(3, len(captured.layers)))
    for mode in (True, False, True):
        for each in (model, *stages):
            each.train(mode)
        for size in (3, 5):
            assert_same(*step(model, captured, stages, torch.randn(size, 4), torch.sum), tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(name):
    make, told = REFUSED[name]
    with pytest.raises(ArgumentError) as caught:
        capture(make(), torch.randn(3, 4))
    assert told in str(caught.value)


class Evaluated(Exported):
    """Needs a buffer in evaluation only."""

    def forward(self, x):
        x = super().forward(x)
        return x if self.training else x * self.mean


def test_a_buffer_that_training_does_not_need_is_refused_when_it_is_needed():
    captured = capture(Evaluated(), torch.randn(3, 4))
    stages = cut(captured, 2)
    for each in stages:
        each.eval()
    with pytest.raises(ArgumentError, match="need 'mean', which they do not use in training"):
        forward(stages, captured.inputs(torch.randn(3, 4)))
