"""Modules that are tied by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd.errors import ArgumentError
from coordd_torch.pipeline.build import materialise, outline
from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.layout import Layout
from coordd_torch.pipeline.tying import check_statistics, tied

REUSE = {"embedding": ["0", "3"]}


def build():
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7, bias=False))


def test_modules_under_a_key_have_the_parameters_of_the_first():
    model = build()
    weight = model[0].weight
    assert tied(model, REUSE) is model
    assert model[3].weight is weight is model[0].weight
    config = cd.PipelineConfig(reuse=REUSE, layers_per_proc=[2, 2])
    assert Layout.of(capture(model), 2, config).tied == {"0.weight": (0, 1)}


def test_a_builder_builds_them_tied():
    torch.manual_seed(0)
    whole = tied(build, REUSE)()
    assert whole[3].weight is whole[0].weight
    assert outline(tied(build, REUSE))[3].weight.is_meta
    torch.manual_seed(0)
    part = materialise(tied(build, REUSE), {"3.weight"})
    assert torch.equal(part[3].weight, whole[3].weight)
    assert part[1].weight.is_meta


def test_what_they_do_not_share_stays_their_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3, bias=False)), nn.Linear(3, 3))
    bias = model[2].bias
    tied(model, {"a": ["0", "1.0"], "b": ["1.0", "2"]})
    assert model[0].weight is model[1][0].weight is model[2].weight
    assert model[2].bias is bias


def test_a_module_that_is_called_again_may_be_named_under_a_key():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2] = model[0]
    with pytest.raises(ArgumentError, match="form a cycle"):
        Layout.of(capture(model), 2, cd.PipelineConfig(layers_per_proc=[1, 2]))
    config = cd.PipelineConfig(layers_per_proc=[1, 2], reuse={"block": ["0"]})
    assert Layout.of(capture(model), 2, config).tied["0.weight"] == (0, 1)


@pytest.mark.parametrize(
    ("reuse", "text"),
    [
        ({"key": ["0", "head"]}, "reuse names 'head' under 'key', and the model has no such module; there are: 0, 1"),
        ({"key": ["0", "2"]}, "reuse ties '2' to '0' under 'key', but they have no parameter of a name and a shape"),
    ],
)
def test_what_cannot_be_tied_is_refused(reuse, text):
    with pytest.raises(ArgumentError, match=text):
        tied(build(), reuse)


def test_without_keys_nothing_is_tied():
    assert tied(build, ["0"]) is build


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)])
def test_statistics_that_several_stages_would_track_are_refused(norm):
    model = nn.Sequential(norm, nn.Linear(3, 3), norm)
    layout = Layout.of(capture(model), 2, cd.PipelineConfig(layers_per_proc=[1, 2], reuse=["0"]))
    with pytest.raises(ArgumentError, match="'0' is called in stages 0, 1, and tracks running statistics"):
        check_statistics(model, layout.holders)
    norm.eval()
    check_statistics(model, layout.holders)
    whole = Layout.of(capture(model.train()), 1, cd.PipelineConfig(layers_per_proc=[3]))
    check_statistics(model, whole.holders)
