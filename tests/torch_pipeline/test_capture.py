from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.capture import capture, stage
from coordd_torch.pipeline.failure import CaptureError
from tests.torch_pipeline.captures import assert_same, assert_whole, cut, forward, step
from tests.torch_pipeline.models import Guarded, ResNet, Stations, Tied, Undecided, UNet


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def images(count):
    return torch.randn(count, 2, 7, 7)


def state(count):
    return {"batch": {"image": torch.randn(count, 5)}, "scale": torch.randn(count, 1), "times": 2}


def tokens(count):
    return (torch.randint(0, 11, (count, 3 + count % 3)),)


CASES = {
    "sequential": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.Tanh()),
        lambda count: torch.randn(count, 3),
        lambda out: out.square().sum(),
        "sequential",
    ),
    "resnet": (ResNet, images, lambda out: out.square().sum(), "fx"),
    "unet": (UNet, lambda count: torch.randn(count, 6), lambda out: out.square().sum(), "fx"),
    "stations": (Stations, state, lambda out: out["logits"].square().sum() * out["count"], "fx"),
    "tied": (Tied, tokens, lambda out: out.square().sum(), "fx"),
    "guarded": (Guarded, lambda count: {"x": torch.randn(count, 4), "shift": 3}, lambda out: out[0].sum(), "export"),
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_stages_do_what_the_model_does(name, count):
    make, batch, loss, way = CASES[name]
    model = make().double()
    double = lambda value: torch.utils._pytree.tree_map_only(  # noqa: E731 - a short way to say it
        torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, value
    )
    captured = capture(model, double(batch(4)))
    stages = cut(captured, count)
    assert captured.way == way
    assert_whole(model, stages)
    for size in (4, 6, 2, 5):
        assert_same(*step(model, captured, stages, double(batch(size)), loss), tolerance=1e-12)
    for each in (model, *stages):
        each.eval()
    assert_same(*step(model, captured, stages, double(batch(3)), loss), tolerance=1e-12)


def test_without_an_example_shapes_and_optional_arguments_stay_open():
    model = Stations()
    captured = capture(model)
    stages = cut(captured, 3)
    for batch in ({"image": torch.ones(2, 5)}, (({"image": torch.ones(3, 5)}),)):
        output = forward(stages, captured.inputs({"batch": batch} if isinstance(batch, dict) else batch))[-1][1]
        assert output["output"]["count"] == 4


def test_the_model_is_not_touched_and_no_luck_is_used():
    model, batch = Tied(), tokens(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    luck = torch.get_rng_state()
    cut(capture(model, batch), 2)
    assert torch.equal(torch.get_rng_state(), luck)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize(("make", "batch"), [(Guarded, torch.randn(4, 4)), (Tied, tokens(3))])
def test_a_model_without_data_has_the_same_layers(make, batch):
    with torch.device("meta"):
        empty = make()
    captured, real = capture(empty, batch), capture(make(), batch)
    assert captured.table == real.table
    assert [each.interface(captured.inputs(batch)).reads for each in cut(captured, 3)] == [
        each.interface(real.inputs(batch)).reads for each in cut(real, 3)
    ]


def test_a_stage_holds_nothing_of_the_others():
    model = Tied()
    captured = capture(model, tokens(3))
    first, last = cut(captured, 2)
    assert set(first.state_dict()) == {
        "embedding.weight", "head.weight", "position", "blocks.0.weight", "blocks.0.bias"
    }  # fmt: skip
    assert first.get_parameter("embedding.weight") is last.get_parameter("head.weight")
    assert dict(last.named_parameters()).keys() == {
        "embedding.weight", "blocks.1.weight", "blocks.1.bias", "blocks.2.weight", "blocks.2.bias"
    }  # fmt: skip
    held = {id(module) for module in last.modules()}
    assert id(model.blocks[0]) not in held


def test_a_stage_without_data_can_be_filled_and_stays_tied():
    with torch.device("meta"):
        empty = Tied()
    empty.head.weight = empty.embedding.weight
    batch, model = tokens(3), Tied().eval()
    captured = capture(empty, batch)
    stages = cut(captured, 2)
    for each in stages:
        each.to_empty(device="cpu")
        each.load_state_dict({name: value for name, value in model.state_dict().items() if name in each.state_dict()})
        assert each.get_parameter("embedding.weight") is each.get_parameter("head.weight")
        each.eval()
    assert torch.equal(forward(stages, captured.inputs(batch))[-1][1]["output"], model(*batch))


def test_the_table_tells_reads_modules_and_parameters():
    table = capture(Tied(), tokens(3)).table
    assert [row.name for row in table] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [row.reads for row in table] == [(), (0,), (1,), (2,), (3,)]
    assert table[0].parameters == ("position", "embedding.weight")
    assert table[-1].parameters == ("embedding.weight",)
    assert [row.module for row in table][:2] == ["embedding", "blocks.0"]


def test_a_module_that_is_called_again_is_named_in_both_layers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.relu = nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU()

        def forward(self, x):
            return self.one(self.relu(self.two(self.relu(self.one(x)))))

    table = capture(Twice()).table
    assert [row.name for row in table] == ["one", "relu", "two", "relu#2", "one#2"]
    assert [row.module for row in table] == ["one", "", "two", "", "one"]


def test_skips_go_straight_from_producer_to_consumer():
    captured = capture(UNet(), torch.randn(2, 6))
    first, middle, last = stage(captured, 0, 1), stage(captured, 2, 3), stage(captured, 4, 5)
    assert len(first.writes) == 2
    assert set(first.writes) & set(middle.reads) & set(last.reads) == set()
    assert set(first.writes) <= {*middle.reads, *last.reads}
    assert set(first.writes) & set(last.reads)


def test_depth_opens_lists_in_lists():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))

        def forward(self, x):
            return self.body[1](self.body[0](x))

    model = Nested()
    assert [name for name, _ in capture(model).layers] == ["body.0", "body.1"]
    assert [name for name, _ in capture(model, depth=2).layers] == ["body.0.0", "body.0.1", "body.1.0", "body.1.1"]


def test_what_prevents_a_cut_is_told(capsys):
    with pytest.raises(CaptureError) as caught:
        capture(Undecided(), torch.randn(2, 3))
    text = str(caught.value)
    assert "models.py" in text
    assert "`if x.sum() > 0:  # here`" in text
    assert "the value of `gt(sum(first(x)), 0)` decides over control flow" in text
    assert "cuts=[" in text
    assert "data-dependent" in text
    assert all("models.py" in place for place in caught.value.places)
    assert "def forward" not in capsys.readouterr().err  # torch.export's graph would bury the error


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (int, "the value of `sum(x)` becomes a number"),
        (float, "the value of `sum(x)` becomes a number"),
        (list, "the value of `sum(x)` is iterated over"),
    ],
)
def test_the_value_that_is_needed_at_the_capture_is_told(use, told):
    class Needy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x), use(x.sum())

    with pytest.raises(CaptureError, match=re.escape(told)):
        capture(Needy())


def test_what_the_output_takes_from_early_layers_is_read_by_the_last():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            first = self.layers[0](x)
            return self.layers[2](self.layers[1](first)), first

    assert [row.reads for row in capture(Two()).table] == [(), (0,), (0, 1)]


def test_what_does_not_fit_is_refused():
    captured = capture(Tied(), tokens(3))
    with pytest.raises(ArgumentError, match="does not take this batch"):
        captured.inputs((1, 2))
    with pytest.raises(ArgumentError, match="layers 0 to 4"):
        stage(captured, 2, 5)
    with pytest.raises(ArgumentError, match="also read"):
        stage(captured, 1, 2)(captured.inputs(tokens(3)))
    with pytest.raises(ArgumentError, match="not those of a batch"):
        stage(captured, 0, 2)({"words": 3})
