"""`cuts` names where a stage may begin, and changes nothing of what the model computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.failure import CaptureError
from tests.torch_pipeline.captures import assert_same, assert_whole, cut, step
from tests.torch_pipeline.models import ResNet, Stations, Tied, UNet


class Block(nn.Module):
    """Has a part that only some inputs go through."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.third = nn.Linear(4, 4)

    def forward(self, x):
        x = x + self.inner(self.norm(x))
        if float(x.detach().sum()) > 0:
            x = self.third(x)
        return x


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = self.embed(x).relu()
        for block in self.blocks:
            x = block(x) * 1.5
        return self.head(x)


class Chosen(nn.Module):
    """Its own forward decides by data."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for part in self.parts[: 3 if x.sum() > 0 else 2]:
            x = part(x)
        return x


class Recalled(nn.Module):
    """Calls a module with state twice, with others between."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.alias = self.two

    def forward(self, x):
        return self.three(self.one(self.alias(self.one(x).tanh())))


def nested():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Block(), nn.Linear(4, 4)), nn.Linear(4, 4))


MODELS = {
    "sequential": (nested, lambda: torch.randn(3, 4), lambda out: out.square().sum()),
    "branched": (Branched, lambda: torch.randn(3, 4), lambda out: out.square().sum()),
    "chosen": (Chosen, lambda: torch.randn(3, 4), lambda out: out.square().sum()),
    "recalled": (Recalled, lambda: torch.randn(3, 4), lambda out: out.square().sum()),
    "resnet": (ResNet, lambda: torch.randn(3, 2, 7, 7), lambda out: out.square().sum()),
    "unet": (UNet, lambda: torch.randn(3, 6), lambda out: out.square().sum()),
    "stations": (
        Stations,
        lambda: {"batch": {"image": torch.randn(3, 5)}, "scale": torch.randn(3, 1), "times": 2},
        lambda out: out["logits"].square().sum() * out["count"],
    ),
    "tied": (Tied, lambda: (torch.randint(0, 11, (3, 5)),), lambda out: out.square().sum()),
}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_names_give_what_the_model_gives_or_are_refused(name, data):
    make, batch, loss = MODELS[name]
    torch.manual_seed(0)
    model = make()
    names = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    cuts = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    example = batch()
    try:
        captured = capture(model, example, cuts=cuts)
    except ArgumentError:
        return
    count = len(captured.layers)
    assert count <= len(cuts) * 2 + 1  # a module may be called twice
    stages = cut(captured, count)
    assert_whole(model, stages)
    for each in (example, batch(), batch()):
        assert_same(*step(model, captured, stages, each, loss), tolerance=1e-5)


@pytest.mark.parametrize(
    ("make", "cuts", "layers"),
    [
        (nested, ["1"], ["0", "1.0"]),
        (nested, ["2", "1.1"], ["0", "1.1", "2"]),
        (nested, ["1.1.third"], CaptureError),  # the `if` around it is the model's own then
        (Branched, ["blocks.1"], ["embed", "blocks.1"]),
        (Branched, ["embed", "head"], ["embed", "head"]),
        (Branched, ["blocks"], ["embed", "blocks.0"]),
        (Branched, ["blocks.1.inner"], CaptureError),
        (Chosen, ["parts.0", "parts.1", "parts.2"], CaptureError),
        (Recalled, ["alias"], ["one", "two"]),
        (Tied, ["embedding", "head"], ["embedding", "head"]),
    ],
)
def test_stages_begin_at_the_named_modules_only(make, cuts, layers):
    torch.manual_seed(0)
    model = make()
    batch = (torch.randint(0, 11, (3, 5)),) if make is Tied else torch.randn(3, 4)
    if layers is CaptureError:
        with pytest.raises(CaptureError):
            capture(model, batch, cuts=cuts)
        return
    captured = capture(model, batch, cuts=cuts)
    assert [name for name, _ in captured.layers] == layers
    assert_same(*step(model, captured, cut(captured, len(layers)), batch, torch.sum), tolerance=1e-6)


def test_a_layer_is_a_call_of_the_module_that_others_call_too():
    assert [row.module for row in capture(Recalled(), torch.ones(2, 4), cuts=["two"]).table] == ["one", "one"]


@pytest.mark.parametrize(
    ("cuts", "told"),
    [(["embedding", "tail"], "has no module 'tail'"), ([], "has no module to cut at"), (["dropout"], "cuts names")],
)
def test_names_at_which_no_stage_can_begin_are_refused(cuts, told):
    model = Tied()
    model.dropout = nn.Dropout()  # is never called
    with pytest.raises(ArgumentError, match=told):
        capture(model, (torch.randint(0, 11, (3, 5)),), cuts=cuts)


@pytest.mark.parametrize(
    ("make", "cuts", "told"),
    [
        (Chosen, None, "into a module of its own, and name the modules at which stages may begin, as in cuts=["),
        (Chosen, ["parts.1"], "into a module of its own that holds none of cuts=['parts.1']"),
        (Branched, ["blocks.1.inner", "head"], "leave 'blocks.1.inner' out of cuts, so that 'blocks.1' is called as a"),
    ],
)
@pytest.mark.parametrize("example", [True, False])
def test_control_flow_that_depends_on_data_is_told_in_a_sentence_with_the_remedy(make, cuts, told, example):
    with pytest.raises(CaptureError) as caught:
        capture(make(), torch.randn(3, 4) if example else None, cuts=cuts)
    text = str(caught.value)
    assert told in text
    assert "data-dependent control flow at " in text
    assert "\n" not in text
    assert "experts_implementation" not in text
    assert ("give an `example`" in text) is not example


def test_what_the_remedy_says_works():
    assert [name for name, _ in capture(Branched(), torch.randn(3, 4), cuts=["blocks.1", "head"]).layers] == [
        "embed",
        "blocks.1",
        "head",
    ]
