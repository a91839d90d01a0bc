"""What a pipeline makes of models and splits that are odd: it works, or every rank hears at once what is wrong."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import coordd.torch as cd
from coordd_torch.pipeline.failure import CaptureError
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import compare, doubles, in_one_piece, pipeline, random


def dense(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))


class Circle(nn.Module):
    """Its first layer is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.between, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.between(self.again(x))))


class Undecided(nn.Module):
    """Nobody knows without data which way it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 0:  # here
                x = -x
        return x


class Fickle(nn.Module):
    """Gives its result in another structure each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self._wrapped = itertools.cycle([lambda x: x, lambda x: {"x": x, "name": "x"}, lambda x: (None, [x, 3])])

    def forward(self, given: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves(given)
        (x,) = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return next(self._wrapped)(self.linear(x))


class Plain(nn.Linear):
    """Takes the tensor out of any structure."""

    def forward(self, given: Any) -> torch.Tensor:
        leaves = torch.utils._pytree.tree_leaves(given)
        return super().forward(next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))


def refused(model: Any, *told: str, **settings: Any) -> None:
    """Every rank is told why a model cannot be split like this, and goes on."""
    with pytest.raises(cd.ArgumentError) as caught:
        pipeline(model, **settings)
    text = str(caught.value)
    assert all(each in text for each in told), text
    assert cd.allreduce(torch.ones(1), op=cd.Sum) == cd.size()


@ranks(2, 4)
def case_a_stage_without_layers() -> None:
    refused(dense(4), "gives stage 1 0 layers: each stage needs one or more", layers_per_proc=[2, 0, 2])


@ranks(2, 4)
def case_more_stages_than_layers() -> None:
    layers = cd.size() - 1
    refused(dense(layers), f"{cd.size()} stages need {cd.size()} layers", f"the model has {layers}")
    refused(dense(layers), f"use at most {layers} stages", "'0'", layers_per_proc=[1] * cd.size())
    refused(dense(12), f"{cd.size()} ranks have {cd.size()}", layers_per_proc=[4, 4, 4])


@ranks(2, 4)
def case_a_cut_through_a_circle() -> None:
    circle = "form a cycle and must share a stage: 'again', 'between', 'again#2'"
    refused(Circle(), circle, "reuse=['again']", layers_per_proc=[1] * 4 if cd.size() == 4 else [2, 2])


@ranks(2, 4)
def case_a_circle_whose_layer_is_copied() -> None:
    with doubles():
        torch.manual_seed(0)
        model = Circle()
        pipe = pipeline(copy.deepcopy(model), layers_per_proc=[1] * 4 if cd.size() == 4 else [2, 2], reuse=["again"])
        x, y = random(9, 6), torch.zeros(9, dtype=torch.long)
        assert_close([pipe.train_batch(x, y)], in_one_piece(model, x, y, 4, 1), rtol=1e-12, atol=1e-12)
        compare(pipe, model)


@ranks(2, 4)
def case_a_model_whose_way_depends_on_data() -> None:
    with pytest.raises(CaptureError) as caught:
        pipeline(Undecided())
    text = str(caught.value)
    assert "cases_pipeline_input.py" in text
    assert "`if x.mean() > 0:  # here`" in text
    assert "the value of `gt(mean(layers.0(x)), 0)` decides over control flow" in text
    assert "cuts=[" in text
    assert cd.allreduce(torch.ones(1), op=cd.Sum) == cd.size()


@ranks(2, 4)
def case_a_layer_that_gives_another_structure_each_time() -> None:
    with doubles():
        for schedule in ("1f1b", "zb-v"):
            torch.manual_seed(0)
            model = nn.Sequential(*(Fickle() for _ in range(8)), Plain(6, 3))
            pipe = pipeline(copy.deepcopy(model), schedule=schedule)
            x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
            losses = [pipe.train_batch(x, y) for _ in range(2)]
            assert_close(losses, in_one_piece(model, x, y, 4, 2), rtol=1e-12, atol=1e-12)
            compare(pipe, model)


@ranks(2)
def case_ranks_with_different_settings() -> None:
    told = "the ranks of a pipeline differ in layers_per_proc ([1, 3] on rank 0, [3, 1] on rank 1): "
    refused(dense(4), told, layers_per_proc=[3, 1] if cd.rank() else [1, 3])


@ranks(2)
def case_autocast_on_one_rank() -> None:
    pipe = pipeline(dense(4))
    told = r"the ranks of a pipeline differ in autocast \(off on rank 0, bfloat16 on cpu on rank 1\)"
    with torch.autocast("cpu", enabled=bool(cd.rank())), pytest.raises(cd.ArgumentError, match=told):
        pipe.train_batch(random(18, 6), torch.zeros(18, dtype=torch.long))
