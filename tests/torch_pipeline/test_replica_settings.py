"""Ranks that train the same parameters in other ways are told on all ranks, when and wherever the difference comes."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import coordd.torch as cd
from coordd.errors import CoorddError
from tests.local_ranks import local_ranks

X, Y = torch.ones(4, 3), torch.zeros(4, 3)
MODEL = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def tied():
    model = copy.deepcopy(MODEL)
    model[2].weight = model[0].weight
    return model


def sgd(lr=0.1):
    return lambda values: torch.optim.SGD(values, lr=lr)


def pipeline(model=None, optimizer=None, *, replicas=2):
    config = cd.PipelineConfig(microbatches=2, split="layers", data_parallel=replicas)
    made = copy.deepcopy(MODEL) if model is None else model
    return cd.Pipeline(made, config, optimizer=optimizer or sgd(), loss=functional.mse_loss)


def apart(values):
    values = list(values)
    return torch.optim.SGD([{"params": values[:1]}, {"params": values[1:], "lr": 0.5}], lr=0.1)


def later(pipe):
    pipe.optimizers[0].param_groups[0]["lr"] = 0.2


def thaw(pipe):
    next(iter(pipe.stages.values())).module.get_parameter("0.bias").requires_grad_(requires_grad=False)


def loaded(pipe):
    with torch.no_grad():
        next(iter(pipe.stages.values())).module.get_parameter("0.weight").add_(1)


def added(pipe):
    pipe.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1})


MADE = {
    "another class": (torch.optim.Adam, "the optimizer of stage 0 (SGD on rank 0, Adam on rank 1)"),
    "another learning rate": (sgd(0.2), "lr of parameter group 0 of stage 0 (0.1 on rank 0, 0.2 on rank 1)"),
    "other groups": (apart, "the parameters of parameter group 0 of stage 0"),
}
LATER = {
    "another learning rate": (later, "lr of parameter group 0 of stage 0 (0.1 on rank 0, 0.2 on rank 1)"),
    "a frozen layer": (thaw, "the frozen parameters of stage 0 (none on rank 0, 0.bias on rank 1)"),
    "other values": (loaded, "the values of 0.weight"),
    "another group": (added, "the number of parameter groups of stage 0 (1 on rank 0, 2 on rank 1)"),
}


def refused(body):
    """What each of two ranks is told."""
    with local_ranks(2) as ranks:
        return [str(error) for error in ranks.errors(body, CoorddError)]


@pytest.mark.parametrize("name", MADE)
def test_replicas_with_other_optimizers_are_refused_when_they_are_made(name):
    optimizer, told = MADE[name]
    texts = refused(lambda rank: pipeline(optimizer=optimizer if rank else sgd()))
    assert all(told in text for text in texts), texts


@pytest.mark.parametrize(
    ("name", "steps"), [(name, steps) for name in LATER for steps in (0, 2) if not steps or name != "other values"]
)
def test_what_comes_later_is_told_before_the_next_step(name, steps):
    change, told = LATER[name]

    def body(rank):
        pipe = pipeline()
        for _ in range(steps):
            pipe.train_batch(X, Y)
        before = copy.deepcopy(pipe.state_dict())
        if rank:
            change(pipe)
            before = copy.deepcopy(pipe.state_dict())
        try:
            pipe.train_batch(X, Y)
        finally:
            assert all(torch.equal(value, before[key]) for key, value in pipe.state_dict().items())

    texts = refused(body)
    assert all(told in text for text in texts), texts
    assert all("the same optimizer, hyperparameters and values" in text for text in texts)


def changed(pipe):
    for value in next(iter(pipe.stages.values())).module.parameters():
        value.data.mul_(1.1)


def without_momentum(pipe):
    for optimizer in pipe.optimizers:
        optimizer.state.clear()


@pytest.mark.parametrize(("model", "replicas"), [(None, 2), (tied, 1)])
@pytest.mark.parametrize("change", [changed, without_momentum])
@pytest.mark.parametrize("after", [1, 5])
def test_values_that_become_different_later_are_told_one_step_after_they_are_compared(model, replicas, change, after):
    def body(rank):
        def sgd(values):
            return torch.optim.SGD(values, lr=0.05, momentum=0.9)

        pipe = pipeline(model and model(), sgd, replicas=replicas)
        for step in range(1, 20):
            try:
                pipe.train_batch(X, Y)
            except cd.MismatchError as error:
                return step, str(error)
            if rank and step == after:
                change(pipe)
        return 20, ""

    with local_ranks(2) as ranks:
        told = ranks.each(body)
    next_due = {1: 2, 5: 8}[after]
    assert [step for step, _ in told] == [next_due + 1 + (change is without_momentum and after == 1) * 2] * 2
    assert all("a Pipeline no longer have the same values of 0." in text for _, text in told)
    assert all(re.search(r"\(-?[\d.]+ on rank 0; -?[\d.]+ on rank 1\)", text) for _, text in told)


def test_a_rank_without_the_parameter_hears_of_different_values_too():
    def body(rank):
        config = cd.PipelineConfig(microbatches=2, split="layers", data_parallel=[1, 2])
        pipe = cd.Pipeline(copy.deepcopy(MODEL), config, optimizer=sgd(), loss=functional.mse_loss)
        pipe.train_batch(X, Y)
        if rank == 2:
            changed(pipe)
        pipe.train_batch(X, Y)
        with pytest.raises(CoorddError, match=r"no longer have the same values of 2\.") as told:
            pipe.train_batch(X, Y)
        return type(told.value).__name__

    with local_ranks(3) as ranks:
        assert ranks.each(body) == ["RefusedError", "MismatchError", "MismatchError"]


class Codebook(nn.Module):
    """Writes to a frozen parameter in its forward pass, from the rows that it gets."""

    def __init__(self):
        super().__init__()
        self.largest = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x


def test_replicas_may_write_to_frozen_parameters_as_to_buffers():
    rows = torch.arange(12.0).reshape(4, 3)

    def body(_):
        pipe = pipeline(nn.Sequential(Codebook(), copy.deepcopy(MODEL[0])))
        for _ in range(6):
            pipe.train_batch(rows, Y)

    with local_ranks(2) as ranks:
        ranks.each(body)


def test_what_was_compared_before_a_checkpoint_is_loaded_is_forgotten(tmp_path):
    def body(rank):
        pipe = pipeline()
        pipe.train_batch(X, Y)
        pipe.save(tmp_path / "saved")
        if rank:
            changed(pipe)
        pipe.train_batch(X, Y)
        pipe.load(tmp_path / "saved")
        for _ in range(4):
            pipe.train_batch(X, Y)

    with local_ranks(2) as ranks:
        ranks.each(body)


def test_different_values_are_allowed_without_check_parameters():
    def body(rank):
        pipe = pipeline()
        for step in range(4):
            pipe.train_batch(X, Y)
            if rank and not step:
                changed(pipe)

    with local_ranks(2, check_parameters=False) as ranks:
        ranks.each(body)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "pipedream", "2bw"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_a_parameter_stay_equal_under_each_schedule(schedule, replicas):
    def body(_):
        config = cd.PipelineConfig(microbatches=2, split="layers", data_parallel=replicas, schedule=schedule)
        pipe = cd.Pipeline(tied(), config, optimizer=torch.optim.Adam, loss=functional.mse_loss)
        for _ in range(9):
            pipe.train_batch(X, Y)

    with local_ranks(2 * replicas) as ranks:
        ranks.each(body)


def test_stages_may_differ_unless_they_are_tied(caplog):
    def free(rank):
        pipe = pipeline(optimizer=torch.optim.Adam if rank else sgd(), replicas=1)
        pipe.optimizers[0].param_groups[0]["lr"] = 0.01 * (rank + 1)
        return pipe.train_batch(X, Y)

    with local_ranks(2) as ranks:
        assert len(set(ranks.each(free))) == 1
    [told] = [record.getMessage() for record in caplog.records if "classes" in record.getMessage()]
    assert "different classes (SGD on rank 0, Adam on rank 1)" in told
    texts = refused(lambda rank: pipeline(tied(), sgd(0.1 + rank), replicas=1))
    assert all("lr of 0.weight (0.1 on rank 0, 1.1 on rank 1)" in text for text in texts), texts


@pytest.mark.parametrize("which", [{0}, {1}, {0, 1}])
def test_a_scheduler_that_steps_on_some_ranks_only_is_warned_of_once(caplog, which):
    def body(rank):
        pipe = pipeline(replicas=1)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in pipe.optimizers]
        for _ in range(4):
            pipe.train_batch(X, Y)
            if rank in which:
                for scheduler in schedulers:
                    scheduler.step()

    with local_ranks(2) as ranks:
        ranks.each(body)
    told = [record.getMessage() for record in caplog.records if "hyperparameters" in record.getMessage()]
    if which == {0, 1}:
        assert not told
    else:
        mine, other = (f"stages of {ranks} have changed since the last" for ranks in ("this rank", "another rank"))
        assert len(told) == 2
        assert sorted(mine in text for text in told) == sorted(other in text for text in told) == [False, True]


def test_training_goes_on_once_they_are_alike():
    def body(rank):
        pipe = pipeline()
        first = pipe.train_batch(X, Y)
        if rank:
            later(pipe)
        with pytest.raises(CoorddError):
            pipe.train_batch(X, Y)
        pipe.optimizers[0].param_groups[0]["lr"] = 0.05
        assert pipe.eval_batch(X, Y) < first
        assert pipe.train_batch(X, Y) < first

    with local_ranks(2) as ranks:
        ranks.each(body)


def test_optimizers_of_one_class_have_the_same_defaults_on_all_ranks():
    """Also of stages that have no parameters in common: such a learning rate depends on the rank by mistake."""
    texts = refused(lambda rank: pipeline(optimizer=sgd(0.1 + rank), replicas=1))
    assert all("differ in lr of SGD (0.1 on rank 0, 1.1 on rank 1): optimizer= must" in text for text in texts), texts


def test_stages_of_one_rank_have_optimizers_with_the_same_defaults_too():
    rates = iter([0.1, 0.2, 0.1, 0.2])
    four = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])

    def made(values):
        return sgd(next(rates))(values)

    def body(rank):
        config = cd.PipelineConfig(microbatches=2, split="layers", schedule="interleaved", chunks=2)
        return cd.Pipeline(copy.deepcopy(four), config, optimizer=made, loss=functional.mse_loss)

    texts = refused(body)
    assert all("differ in lr of SGD (0." in text for text in texts), texts


def test_a_learning_rate_for_some_parameters_is_given_in_their_group():
    def body(rank):
        def optimizer(values):
            return torch.optim.SGD([{"params": [*values], "lr": 0.5 if rank else 0.1}], lr=0.1)

        return pipeline(optimizer=optimizer, replicas=1).train_batch(X, Y)

    with local_ranks(2) as ranks:
        first, second = ranks.each(body)
    assert first == second
