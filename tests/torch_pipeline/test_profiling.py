"""What layers cost is measured, and changes nothing."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd_torch.pipeline import profiling
from coordd_torch.pipeline.build import outline
from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.profiling import profile

ROWS, WIDTH = 4, 8
VALUE = ROWS * WIDTH * 4


class Clock:
    """Stands still while nobody works."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(profiling, "time", found)
    return found


class Work(torch.autograd.Function):
    """Takes so many seconds forward, and twice as many backward."""

    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += 2 * ctx.seconds
        return gradient, None, None


class Working(nn.Linear):
    def __init__(self, clock, seconds):
        super().__init__(WIDTH, WIDTH)
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        return Work.apply(super().forward(x), self.clock, self.seconds)


class Far(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        first = self.first(x)
        return self.last(torch.cat([self.third(self.second(first)), first], 1))


def measured(model, x=None, finish=None, **settings):
    captured = capture(model)
    given = captured.inputs(torch.randn(ROWS, WIDTH) if x is None else x)
    return profile(captured, given, cd.PipelineConfig(**settings), finish=finish)


def line():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Flatten(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


@pytest.mark.parametrize("made", [lambda build: build(), outline], ids=["with data", "without"])
def test_a_layer_that_takes_longer_gets_a_stage_of_its_own(made, clock):
    found = measured(made(lambda: nn.Sequential(*(Working(clock, 20 if at == 3 else 1) for at in range(6)))))
    assert found.split(3) == (range(3), range(3, 4), range(4, 6))
    assert [load.forward for load in found.loads] == [1, 1, 1, 20, 1, 1]
    assert [load.backward for load in found.loads] == [2, 2, 2, 40, 2, 2]
    assert [load.inward for load in found.loads] == [0, 2, 2, 40, 2, 2]


def test_only_gradients_of_inputs_are_waited_for():
    found = measured(line())
    assert found.loads[0].inward == 0  # the batch has no gradients
    assert found.loads[1].inward == found.loads[1].backward > 0  # it has no weights
    assert 0 < found.loads[3].inward <= found.loads[3].backward


def test_what_layers_keep_counts_once():
    found = measured(line())
    assert [load.activation for load in found.loads] == [0, VALUE, 0, 0, VALUE]
    assert [border.kept for border in found.borders] == [VALUE] * 4
    assert all(border.volume > VALUE for border in found.borders)
    assert [load.parameters for load in found.loads] == [288, 0, 0, 288, 0]


def test_what_skips_layers_crosses_every_cut_on_its_way():
    found = measured(Far(), torch.randn(64, 2))
    value = 64 * 2 * 4
    assert [border.volume // value for border in found.borders] == [1, 2, 2]
    assert [load.activation // value for load in found.loads] == [0, 1, 1, 2]
    assert [border.kept for border in found.borders] == [0, value, 0]  # the rest, a layer behind the cut counts
    assert [load.parameters for load in found.loads] == [24, 24, 24, 40]


def test_the_loss_is_the_last_layers(clock):
    model = nn.Sequential(Working(clock, 1), Working(clock, 1))
    found = measured(model, finish=lambda output: Work.apply(output.sum(), clock, 5))
    assert [load.forward for load in found.loads] == [1, 6]
    assert [load.backward for load in found.loads] == [2, 12]


def test_recomputing_makes_backward_longer(clock):
    model = nn.Sequential(Working(clock, 1), Working(clock, 1))
    found = measured(model, recompute=True).loads[1]
    assert (found.forward, found.backward, found.inward) == (1, 3, 3)


def test_nothing_is_changed():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.LSTM(WIDTH, WIDTH)).eval()
    before, chance = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.ones(ROWS, WIDTH)
    measured(model, x)
    assert torch.equal(torch.get_rng_state(), chance)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(x, torch.ones(ROWS, WIDTH))


def test_no_more_than_one_layer_has_weights_at_a_time(monkeypatch):
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    make = profiling._stand_in

    def noted(tensor, device):
        nonlocal most
        made = make(tensor, device)
        alive.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in alive))
        return made

    monkeypatch.setattr(profiling, "_stand_in", noted)
    model = outline(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))))
    measured(model)
    assert len(alive) == 12
    assert most <= 4  # a layer's, and those of the one before until they are replaced
    assert all(parameter.is_meta for parameter in model.parameters())
