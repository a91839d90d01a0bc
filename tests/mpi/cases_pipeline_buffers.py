"""What several ranks have: buffers at the start, gradients that nobody has; and what a check leaves as it was."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import coordd.torch as cd
from coordd.pipeline.microbatch import cut
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import compare, doubles, in_one_piece, pipeline, random
from tests.mpi.cases_pipeline_input import refused


class Features(nn.Module):
    """Random features, drawn by each rank for itself, and buffers of other kinds."""

    def __init__(self, gives: int, drawn: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(6, gives)
        self.register_buffer("drawn", drawn, persistent=False)
        self.register_buffer("turned", torch.randn(6, 6).T)
        self.register_buffer("spread", torch.randn(6, 1).expand(6, 6))
        self.register_buffer("kept", torch.rand(6, 6) > 0.5)
        self.register_buffer("count", torch.tensor(cd.rank()))
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x @ self.drawn @ (self.turned * self.spread * self.kept) + self.count))


@ranks(2)
def case_buffers_begin_as_those_of_the_first_that_has_them() -> None:
    with doubles():
        x = random(1, 6).expand(8, 6).contiguous()
        for settings in ({"data_parallel": 2}, {"layers_per_proc": [1, 1]}):
            torch.manual_seed(cd.rank())
            drawn = torch.randn(6, 6)
            torch.manual_seed(0)  # parameters must be equal
            pipe = pipeline(nn.Sequential(Features(6, drawn), Features(3, drawn)), **settings)
            found = cd.allgather_object(
                {name: value.clone() for stage in pipe.stages.values() for name, value in stage.module.named_buffers()}
            )
            shared = found[0].keys() & found[1].keys()
            assert {"0.drawn"} <= shared
            assert all(torch.equal(found[0][name], found[1][name]) for name in shared)
            same = pipe.predict(x)
            assert_close(same, same[:1].expand_as(same), rtol=1e-12, atol=1e-12)


class Idle(nn.Module):
    """Has a layer whose result nobody uses, and one that only some microbatches go through."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.some = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.idle(x)
        return self.some(x) if x[0, 0] > 100 else x


@ranks(2)
def case_a_parameter_that_has_no_gradient_is_left_alone() -> None:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)

    with doubles():
        x, y = random(16, 6), torch.zeros(16, dtype=torch.long)
        x[0, 0] = 200
        for replicas in (1, 2):
            torch.manual_seed(0)
            model = nn.Sequential(Idle(), nn.Linear(6, 3))
            config = cd.PipelineConfig(microbatches=4, split="layers", data_parallel=replicas)
            pipe = cd.Pipeline(copy.deepcopy(model), config, optimizer=adamw, loss=functional.cross_entropy)
            optimizer = adamw(model.parameters())
            for _ in range(2):
                pipe.train_batch(x, y)
                optimizer.zero_grad()
                for part in cut(16, 4 * replicas):
                    (functional.cross_entropy(model(x[part]), y[part]) * len(x[part]) / 16).backward()
                optimizer.step()
            assert model[0].idle.weight.grad is None
            compare(pipe, model)


class Counting(nn.Module):
    """Counts its calls, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return functional.dropout(self.linear(x), 0.1, self.training)


@ranks(2)
def case_verifying_parity_leaves_everything_as_it_was() -> None:
    with doubles():
        model = nn.Sequential(Counting(), nn.BatchNorm1d(6), nn.Linear(6, 3))
        pipes = [pipeline(copy.deepcopy(model), layers_per_proc=[2, 1]) for _ in range(2)]
        x, y = random(16, 6), torch.zeros(16, dtype=torch.long)
        before, chance = copy.deepcopy(pipes[0].state_dict()), torch.get_rng_state()
        pipes[0].verify_parity(x, y)
        assert torch.equal(torch.get_rng_state(), chance)
        assert all(torch.equal(value, before[name]) for name, value in pipes[0].state_dict().items())
        for pipe in pipes:
            torch.set_rng_state(chance)
            pipe.train_batch(x, y)
        for name, value in pipes[0].state_dict().items():
            assert torch.equal(value, pipes[1].state_dict()[name]), name


@ranks(2)
def case_two_pipelines_may_have_the_same_layers() -> None:
    with doubles():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
        model[2].eval()
        plain = copy.deepcopy(model)
        x, y = random(16, 6), torch.zeros(16, dtype=torch.long)
        pipeline(model, layers_per_proc=[2, 2]).eval_batch(x, y)
        pipe = pipeline(model, layers_per_proc=[2, 2], recompute=True)
        pipe.train_batch(x, y)
        in_one_piece(plain, x, y, 4, 1)
        compare(pipe, plain)


@ranks(2)
def case_statistics_that_would_drift_apart_are_refused() -> None:
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(norm, nn.Linear(6, 6), norm, nn.Linear(6, 3))
    refused(model, "'0' is called in stages 0, 1", layers_per_proc=[2, 2], reuse=["0"])
