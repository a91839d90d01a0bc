"""Whatever one rank refuses when a pipeline of `coordd.torch` is made, the others hear."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import local_ranks
from tests.refusals.injection import EVERY, check_all


def builder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))  # what has to be traced cannot be in threads


def made(model):
    config = cd.PipelineConfig(microbatches=2)
    return cd.Pipeline(
        model, config, optimizer=lambda values: torch.optim.SGD(values, lr=0.1), loss=nn.functional.mse_loss
    )


def pipeline(model):
    return lambda _: lambda _: made(model)


ROWS, TARGETS = torch.ones(4, 2), torch.zeros(4, 2)
TWO = partial(local_ranks, 2, stall_check=False)
TURNS = {"builder, rank 0": (lambda: builder, 0), "builder, rank 1": (lambda: builder, 1), "built": (builder, 0)}


@pytest.mark.parametrize(("make", "rank"), TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("part", [0.005, *EVERY])
def test_the_others_hear_of_a_rank_that_fails_anywhere(make, rank, part):
    assert len(check_all(TWO, pipeline(make()), rank, part)) > 50


def fitted(folder):
    def make(_):
        pipe = made(builder)
        choices = {"batch_size": 4, "verbose": False, "validation_data": (ROWS, TARGETS)}
        return lambda _: pipe.fit(ROWS, TARGETS, **choices)

    return make


def saved(folder):
    def make(_):
        pipe = made(builder)
        return lambda _: pipe.save(folder)

    return make


def loaded(folder):
    def make(_):
        pipe = made(builder)
        pipe.train_batch(ROWS, TARGETS)
        pipe.save(folder)
        return lambda _: pipe.load(folder)

    return make


METHODS = {"fit": fitted, "save": saved, "load": loaded}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("part", [0.005, *EVERY])
@pytest.mark.filterwarnings("ignore:coordd takes the loss for the mean")  # an error in its check is no error of a step
def test_the_others_hear_of_a_rank_that_fails_anywhere_in_a_method(name, rank, part, tmp_path):
    """An error within the passes of a step ends the job, and they hear that."""
    assert len(check_all(TWO, METHODS[name](tmp_path / "saved"), rank, part)) > 10


class Sulking(nn.Linear):
    """Raises an error when it is told to train, on the rank that has the second stage."""

    def train(self, mode: bool = True):
        if mode and getattr(self, "ready", False):
            raise ValueError("no")
        return super().train(mode)


def test_the_others_hear_of_a_rank_that_fails_before_the_first_pass_of_a_step():
    """They wait to receive what it sends, and are in no call."""

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Sulking(2, 2))

    def body(rank):
        pipe = made(copy.deepcopy(model))
        for stage in pipe.stages.values():
            for module in stage.module.modules():
                if isinstance(module, Sulking):
                    module.ready = True
        with pytest.raises(cd.PeerError if rank == 0 else ValueError, match="no"):
            pipe.train_batch(torch.ones(4, 2), torch.zeros(4, 2))

    with local_ranks(2, stall_check=False) as ranks:
        ranks.each(body)


def test_a_model_whose_gradients_an_optimizer_reduces_is_refused_until_that_is_deleted():
    """Its backward passes would wait for all ranks, and other stages wait for theirs."""

    def body(rank):
        model = builder()
        cd.broadcast_parameters(model.state_dict())
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(cd.ArgumentError if rank == 0 else (cd.ArgumentError, cd.RefusedError), match="Distributed"):
            made(model)
        del optimizer
        return made(model).train_batch(torch.ones(4, 2), torch.zeros(4, 2))

    with local_ranks(2) as ranks:
        first, second = ranks.each(body)
    assert first == second
