"""The user's choices."""

from __future__ import annotations

import pytest

import coordd.torch as cd
from coordd.errors import ArgumentError


def test_a_schedule_that_does_not_exist_comes_with_the_nearest_one():
    with pytest.raises(ArgumentError, match="there is no schedule '1f2b', did you mean 1f1b"):
        cd.PipelineConfig(schedule="1f2b")


@pytest.mark.parametrize("name", ["microbatches", "data_parallel"])
def test_there_is_at_least_one_of_everything(name):
    with pytest.raises(ArgumentError, match=f"{name} is 0, and must be at least 1"):
        cd.PipelineConfig(**{name: 0})


def test_ranks_make_equal_pipelines():
    assert cd.PipelineConfig(data_parallel=2).ranks(6) == 3
    with pytest.raises(ArgumentError, match="5 ranks do not make 2 equal pipelines") as caught:
        cd.PipelineConfig(data_parallel=2).ranks(5)
    assert str(caught.value).endswith("start 4 or 6 ranks, or set data_parallel to 1, 5")
    with pytest.raises(ArgumentError, match="start 4 ranks, or set data_parallel to 1, 3"):
        cd.PipelineConfig(data_parallel=4).ranks(3)


def test_what_needs_the_gradients_of_a_whole_step_is_not_for_those_without_one():
    with pytest.raises(ArgumentError, match="clip_norm looks at the gradients of all stages at a time"):
        cd.PipelineConfig(schedule="pipedream", clip_norm=1.0)


def test_what_is_there_on_demand_only_is_named_when_it_is_not():
    with pytest.raises(AttributeError, match="module 'coordd_torch' has no attribute 'Pipelines'"):
        cd.Pipelines  # noqa: B018 - to be looked up is all it is for


def test_stages_may_have_replicas_of_their_own():
    config = cd.PipelineConfig(data_parallel=[2, 3, 1])
    assert (config.ranks(6), config.widest, config.least) == (3, 3, 6)
    assert [config.fitting(rows) for rows in (6, 11, 12, 99)] == [2, 2, 4, 8]
    with pytest.raises(ArgumentError, match=r"data_parallel=\[2, 3, 1\] takes 6 ranks, and there are 4"):
        config.ranks(4)
    with pytest.raises(ArgumentError, match=r"data_parallel is \[2, 0\], and must be at least 1"):
        cd.PipelineConfig(data_parallel=[2, 0])


def test_only_what_costs_time_is_measured():
    assert not cd.PipelineConfig(split="parameters").measured
    assert not cd.PipelineConfig(split="time", layers_per_proc=[1, 1]).measured
    assert cd.PipelineConfig(split="time").measured
    assert cd.PipelineConfig(layers_per_proc=[1, 1], memory_cap="1GiB").measured


def test_what_cannot_be_even_is_refused():
    with pytest.raises(
        ArgumentError, match="split='colour' is unknown; choose one of time, parameters, layers, memory"
    ):
        cd.PipelineConfig(split="colour")
    with pytest.raises(ArgumentError, match="'2GB' is no amount of memory"):
        cd.PipelineConfig(memory_cap="2GB")


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan")])
def test_gradients_are_not_turned_round(wrong):
    with pytest.raises(ArgumentError, match=r"clip_norm is .*, and must be more than 0"):
        cd.PipelineConfig(clip_norm=wrong)


def test_compressions_are_known():
    with pytest.raises(ArgumentError, match="compression='fp16' is unknown; choose one of None, bf16, int8"):
        cd.PipelineConfig(compression="fp16")


def test_so_many_rows_make_so_many_microbatches():
    config = cd.PipelineConfig(data_parallel=[2, 3, 1])
    assert [config.least_for(microbatches) for microbatches in (1, 2, 3)] == [6, 6, 12]
    assert config.fitting(12) == 4
