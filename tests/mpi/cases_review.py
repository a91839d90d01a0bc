"""What came of a pipeline's step, told on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import coordd.torch as cd
from coordd.errors import ArgumentError
from tests.mpi.cases import ranks


@ranks(2, 4, deadline=60)
def case_a_step_is_reviewed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    config = cd.PipelineConfig(microbatches=4, data_parallel=cd.size() // 2, split="layers")
    pipe = cd.Pipeline(model, config, optimizer=lambda mine: torch.optim.SGD(mine, lr=0.1), loss=functional.mse_loss)
    with pytest.raises(ArgumentError, match="call train_batch first"):
        cd.PipelineReview.of(pipe)
    x = torch.ones(16, 6)
    pipe.train_batch(x, x)
    review = cd.PipelineReview.of(pipe)
    assert review.plan.microbatches == 2 * cd.size()
    for timeline in (review.predicted, review.measured):
        assert [len(mine) for mine in timeline.spans] == [8] * cd.size()
        assert timeline.peaks == (2.0, 1.0) * (cd.size() // 2)
        assert 0 < timeline.bubble < 1
    assert str(review).startswith("1f1b: ")
    pipe.eval_batch(x, x)
    assert [len(mine) for mine in cd.PipelineReview.of(pipe).measured.spans] == [4] * cd.size()
