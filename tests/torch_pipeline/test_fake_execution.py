"""What torch.fx would get wrong without a word is noticed, and left to torch.export."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.failure import CaptureError
from tests.torch_pipeline.captures import assert_same, cut, forward, step


class Linears(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.scale = torch.full((3,), 0.5)  # no buffer, no parameter
        self.register_buffer("seen", torch.zeros(3))

    def body(self, x):
        for block in self.blocks:
            x = block(x) * self.scale
            self.kept = x
        return x


class Branch(Linears):
    def forward(self, x):
        x = self.body(x)
        return x * 2 if isinstance(x, torch.Tensor) else x


class Noise(Linears):
    def forward(self, x):
        return self.body(x) + torch.randn(3)


class Constant(Linears):
    def forward(self, x):
        return self.body(x) + torch.tensor([1.0, 2.0, 3.0])


class Positions(Linears):
    def forward(self, x):
        return self.body(x) + torch.arange(x.shape[0])[:, None]


class Counter(Linears):
    def forward(self, x):
        self.seen.add_(1)
        return self.body(x) + self.seen


class Total(Linears):
    def forward(self, x):
        x = self.body(x)
        self.seen += x.detach().sum(0)
        return x


@pytest.mark.parametrize(
    ("make", "way", "layers"),
    [
        (Branch, "export", 3),
        (Noise, "export", 3),
        (Constant, "fx", 3),
        (Positions, "fx", 3),
        (Counter, "fx", 1),  # the first layer writes what the last reads
        (Total, "fx", 3),
    ],
)
def test_stages_do_what_the_model_does(make, way, layers):
    torch.manual_seed(0)
    model = make()
    captured = capture(model, torch.randn(2, 3))
    assert (captured.way, len(captured.layers)) == (way, layers)
    stages = cut(captured, layers)
    for size in (2, 3, 4):
        assert_same(*step(model, captured, stages, torch.randn(size, 3), torch.sum), tolerance=1e-6)


class Average(Linears):
    """Another tensor becomes the buffer."""

    def forward(self, x):
        self.seen = self.seen * 0.5 + x.detach().sum(0)
        return self.body(x)


class Frozen(Linears):
    def forward(self, x):
        with torch.no_grad():
            x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x))


class Cast(Linears):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](x.float())


class Uncast(Linears):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.body(x)


class Warming(Linears):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) * min(1.0, self.calls / 10)


class Dropping(Linears):
    """Leaves layers out at random."""

    def forward(self, x):
        for block in self.blocks:
            x = x if random.random() < 0.01 else block(x)
        return x


@pytest.mark.parametrize("make", [Average, Frozen, Cast, Uncast, Warming, Dropping, Noise])
def test_what_a_trace_would_lose_or_keep_for_ever_is_refused(make):
    luck = random.getstate()
    with pytest.raises(CaptureError, match=r"no_grad|each time|random numbers"):
        capture(make())
    assert random.getstate() == luck


@pytest.mark.parametrize("make", [Warming, Dropping])
def test_and_so_it_is_by_torch_export(make):
    with pytest.raises(CaptureError, match=r"export: InconstantError: forward .*(each time|random numbers)"):
        capture(make(), torch.randn(2, 3))


@pytest.mark.parametrize("make", [Frozen, Cast])
def test_or_it_is_recorded_by_torch_export(make):
    model = make().eval()
    captured = capture(model, torch.randn(2, 3))
    assert captured.way == "export"
    stages = cut(captured, 2)
    for each in (model, *stages):
        each.train()
    assert_same(*step(model, captured, stages, torch.randn(4, 3), torch.sum), tolerance=1e-6)


def test_gradients_may_be_left_out_where_nothing_is_trained():
    class Careful(Linears):
        def forward(self, x):
            with torch.set_grad_enabled(self.training):
                return self.body(x)

    model = Careful().eval()
    captured = capture(model)
    stages = cut(captured, 2)
    assert captured.way == "fx"
    for mode in (True, False):
        for each in (model, *stages):
            each.train(mode)
        with torch.set_grad_enabled(mode):
            x = torch.randn(2, 3)
            assert torch.equal(forward(stages, captured.inputs(x))[-1][1]["output"], model(x))


def test_an_open_module_that_cannot_be_traced_becomes_a_layer():
    class Looks(Linears):
        def forward(self, x):
            return self.body(x) if x.sum() > 0 else x * 2

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.looks, self.head = Looks(), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.looks(x))

    model = Whole()
    captured = capture(model, torch.ones(2, 3))
    assert [name for name, _ in captured.layers] == ["looks", "head"]
    for batch in (torch.ones(2, 3), -torch.ones(4, 3)):
        assert_same(*step(model, captured, cut(captured, 2), batch, torch.sum), tolerance=1e-6)
