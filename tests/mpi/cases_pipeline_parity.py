"""What `verify_parity` sees, and what it does not take for a difference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

import coordd.torch as cd
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import build, doubles, pipeline, random


@ranks(2, 4)
def case_parity_is_that_of_any_schedule_with_tied_layers_and_replicas() -> None:
    with doubles():
        x, y = random(19, 6), torch.zeros(19, dtype=torch.long)
        for schedule in ("1f1b", "zb-v", "interleaved", "pipedream", "2bw"):
            for replicas in {cd.size() // 2, cd.size()} if cd.size() == 2 else {2}:
                pipe = pipeline(build("tied"), schedule=schedule, data_parallel=replicas)
                before = copy.deepcopy(pipe.state_dict())
                assert pipe.verify_parity(x, y) < 1e-12, (schedule, replicas)
                assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
                assert pipe.train_batch(x, y) > 0


@ranks(2)
def case_models_that_normalise_batches_get_microbatches() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        pipe, other = (pipeline(build("normed")) for _ in range(2))
        assert pipe.verify_parity(x, y) < 1e-12
        assert pipe.train_batch(x, y) == other.train_batch(x, y)
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in pipe.state_dict().items())


@ranks(2)
def case_a_gradient_that_is_spoilt_is_seen_on_all_ranks() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        pipe = pipeline(build("plain"))
        if cd.rank() == 1:
            parameter = next(iter(pipe.stages[1].module.parameters()))
            parameter.register_hook(lambda gradient: gradient + 0.25)
        assert 0.99 < pipe.verify_parity(x, y) < 1.01  # four microbatches


@ranks(2)
def case_a_loss_that_is_no_mean_over_rows_is_seen() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        y[:7] = -100
        config = cd.PipelineConfig(microbatches=4, split="layers")

        def parity(loss, weight=None) -> float:  # type: ignore[no-untyped-def] # as the pipeline says
            pipe = cd.Pipeline(
                build("plain"), config, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=loss, weight=weight
            )
            return pipe.verify_parity(x, y)

        assert parity(lambda output, y: functional.cross_entropy(output, y, reduction="sum")) > 0.1
        assert parity(functional.cross_entropy) > 0.01
        assert parity(functional.cross_entropy, lambda _, y: (y != -100).sum()) < 1e-12


@ranks(2)
def case_a_builder_that_fails_on_one_rank_is_reported_and_no_gradient_is_kept() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        failing = False

        def builder() -> torch.nn.Module:
            if failing and cd.rank() == 1:
                raise KeyError("no model")
            return build("plain")

        pipe, other = pipeline(builder), pipeline(build("plain"))
        failing = True
        with pytest.raises((KeyError, cd.RefusedError), match="no model"):
            pipe.verify_parity(x, y)
        failing = False
        assert pipe.verify_parity(x, y) < 1e-12
        failing = True
        with pytest.raises((KeyError, cd.RefusedError), match="no model"):
            pipe.verify_parity(x, y)
        assert pipe.train_batch(x, y) == other.train_batch(x, y)
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in pipe.state_dict().items())
