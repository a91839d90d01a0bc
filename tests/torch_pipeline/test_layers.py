from __future__ import annotations

from torch import nn

from coordd_torch.pipeline.layers import units


def test_units_are_the_items_of_lists_and_what_holds_no_list():
    model = nn.Module()
    model.stem = nn.Conv2d(1, 1, 1)
    model.body = nn.Module()
    model.body.blocks = nn.ModuleList([nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU()))])
    model.body.norm = nn.LayerNorm(1)
    model.heads = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    rest = {"stem", "body.norm", "heads.a", "heads.b"}
    assert units(model) == rest | {"body.blocks.0"}
    assert units(model, 2) == rest | {"body.blocks.0.0", "body.blocks.0.1"}
    assert units(model, 3) == rest | {"body.blocks.0.0", "body.blocks.0.1.0", "body.blocks.0.1.1"}
    assert units(model, 0) == {"stem", "body", "heads"}


def test_all_names_of_a_module_are_units():
    model = nn.Module()
    model.one = model.other = nn.Linear(1, 1)
    assert units(model) == {"one", "other"}


def test_an_empty_list_opens_nothing():
    model = nn.Module()
    model.block = nn.Module()
    model.block.downsample = nn.Sequential()
    assert units(model) == {"block"}
