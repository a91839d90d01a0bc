"""How models are split on real ranks: by what is measured, under a cap, with replicas for each stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd.errors import ArgumentError
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import MODELS, build, compare, doubles, in_one_piece, pipeline, random, trained


@ranks(3, deadline=60)
def case_stages_have_replicas_of_their_own() -> None:
    with doubles():
        for name in MODELS:
            for schedule in ("gpipe", "1f1b"):
                trained(name, schedule=schedule, data_parallel=[2, 1])
                trained(name, schedule=schedule, data_parallel=[1, 2])


@ranks(4, deadline=60)
def case_wide_stages_stand_anywhere() -> None:
    with doubles():
        for name in MODELS:
            wide = [] if name == "normed" else [[3, 1], [1, 3]]  # whose microbatches have a single row
            for replicas in [*wide, [1, 2, 1], [2, 1, 1]]:
                trained(name, data_parallel=replicas, recompute=name == "skips")


@ranks(4, deadline=60)
def case_replicas_of_a_stage_are_clipped_and_checked_together() -> None:
    with doubles():
        model = build("tied")
        pipe = pipeline(copy.deepcopy(model), clip_norm=0.05, data_parallel=[1, 2, 1])
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        assert pipe.verify_parity(x, y) < 1e-12
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        pipe.train_batch(x, y)
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-9)


@ranks(3, deadline=60)
def case_the_ranks_must_be_as_many_as_all_replicas() -> None:
    with pytest.raises(ArgumentError, match=r"data_parallel=\[2, 2\] takes 4 ranks, and there are 3"):
        pipeline(build("plain"), data_parallel=[2, 2])
    with pytest.raises(
        ArgumentError, match=r"zb-h1 gives all stages equally many replicas.* one of gpipe, 1f1b, 1f1b-eager, 2bw"
    ):
        pipeline(build("plain"), data_parallel=[2, 1], schedule="zb-h1")


@ranks(2, 4, deadline=60)
def case_all_ranks_split_as_rank_0_has_measured() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        settings: list[dict[str, Any]] = [{"split": "time"}, {"split": "memory"}, {"memory_cap": "64 MiB"}]
        for name in MODELS:
            for each in settings:
                model = build(name)
                pipe = pipeline(lambda name=name: build(name), x, **each)
                found = cd.allgather_object(pipe.layout.spans)
                assert found.count(found[0]) == cd.size()
                pipe.train_batch(x, y)
                in_one_piece(model, x, y, 4, 1)
                compare(pipe, model)


@ranks(2, deadline=60)
def case_what_cannot_be_split_so_is_refused_on_every_rank() -> None:
    x = random(18, 6)
    with pytest.raises(ArgumentError, match=r"no split in 2 stages .* stage \d takes .* and lacks .*iB: allow"):
        pipeline(build("plain"), x, memory_cap=100)
    with pytest.raises(ArgumentError, match=r"stage 0, with '0' to '7', takes .* and lacks"):
        pipeline(build("plain"), x, memory_cap="1 KiB", layers_per_proc=[8, 1])
    with pytest.raises(ArgumentError, match="split='time' measures the layers, which takes inputs: give some as `exam"):
        pipeline(build("plain"), split="time")
    with pytest.raises(ArgumentError, match=r"the layers cannot be measured: RuntimeError.*split by 'parameters'"):
        pipeline(build("plain"), random(18, 5), split="time")
    assert cd.allgather_object(cd.rank()) == [0, 1]


@ranks(2, deadline=60)
def case_layers_are_tied_by_name() -> None:
    """As the model with the same parameter in both places is, without a builder and with one."""

    def loose() -> nn.Module:
        model = build("tied")
        model.head.weight = nn.Parameter(torch.zeros(6, 6))
        return model

    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        for model in (loose(), loose):
            whole = build("tied")
            whole.head.bias = whole.layers[0].bias
            pipe = pipeline(model, reuse={"ends": ["layers.0", "head"]})
            losses = [pipe.train_batch(x, y) for _ in range(2)]
            torch.testing.assert_close(losses, in_one_piece(whole, x, y, 4, 2), rtol=1e-12, atol=1e-12)
            compare(pipe, whole)
