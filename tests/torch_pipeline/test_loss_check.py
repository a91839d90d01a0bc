"""Whether the losses of microbatches add up to that of the batch: seen in the first step, or said that it cannot be."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import coordd.torch as cd
from coordd.errors import ArgumentError, PeerError
from coordd.pipeline.batch import Batch
from coordd.pipeline.microbatch import cut
from coordd_torch.pipeline.loss_check import LossCheck
from coordd_torch.pipeline.rows import taken
from tests.local_ranks import local_ranks

CLASSES = 5


def tokens(*, ignored, rows=8):
    """Targets of rows with three tokens; of the first rows so many are left out."""
    found = torch.randint(0, CLASSES, (rows, 3), generator=torch.Generator().manual_seed(1))
    found.view(-1)[:ignored] = -100
    return found


def valid(_, y):
    return (y != -100).sum()


def token_mean(output, y):
    return functional.cross_entropy(output.mT, y)


def token_sum(output, y):
    return functional.cross_entropy(output.mT, y, reduction="sum")


def masked(output, y):
    each = functional.cross_entropy(output.mT, y.clamp(min=0), reduction="none")
    counts = y != -100
    return (each * counts).sum() / counts.sum().clamp(min=1)


def contrastive(output, _):
    flat = functional.normalize(output.flatten(1), dim=1)
    return functional.cross_entropy(flat @ flat.T * 5, torch.arange(len(flat)))


def centred(output, y):
    return token_mean(output - output.mean(0), y)


def squared(output, _):
    return output.square().mean()


def hinge(output, _):
    """Has no gradient for half of the rows."""
    return (output - output.detach()[:, :1, :1] * 0 - 1).clamp(min=0).mean()


def check(loss, targets, *, reduction=None, weigh=None, microbatches=4, output=None, dimensions=None, runs=1):
    """Takes a batch through the check as the last stage does; returns it."""
    rows = len(targets)
    if output is None:
        output = torch.randn(rows, 3, CLASSES, generator=torch.Generator().manual_seed(2))
    made = LossCheck(loss, reduction=reduction, weighted=weigh is not None, dimensions=lambda _: dimensions)
    for _ in range(runs):
        batch = Batch(
            torch.zeros(rows, 1), targets, cut(rows, microbatches), take=taken, named=lambda x: {"x": x}, weigh=weigh,
            summed=reduction == "sum",
        )  # fmt: skip
        made.begin(batch)
        for microbatch in range(batch.count):
            made.look(microbatch, taken(output, batch.parts[microbatch]), batch)
        made.end()
    return made


ROWS = [(8, 4), (8, 2), (9, 4), (8, 8), (7, 2), (3, 3)]

MEANS = {
    "mean": (token_mean, 0, None, None),
    "weighted": (token_mean, 7, None, valid),
    "weighted, a part without tokens": (masked, 12, None, valid),
    "masked": (masked, 7, None, valid),
    "squared": (squared, 0, None, None),
    "hinge": (hinge, 0, None, None),
    "sum": (token_sum, 0, "sum", None),
    "sum of unequal tokens": (token_sum, 7, "sum", None),
    "said to be a mean": (token_mean, 0, "mean", None),
}

WRONG = {
    "sum": (token_sum, 0, None, None, "adds rows up"),
    "a mean that is said to be a sum": (token_mean, 0, "sum", None, "is no sum over rows"),
    "ignore_index": (token_mean, 2, None, None, "rows do not count equally"),
    "mask": (masked, 2, None, None, "rows do not count equally"),
    "said to be a mean over rows": (masked, 2, "mean", None, "rows do not count equally"),
    "sum with a weight": (token_sum, 7, None, valid, "reduction='sum'|no mean by weight="),
    "a wrong weight": (token_mean, 2, None, lambda _, y: y.numel() + (y == -100).sum(), "no mean by weight="),
    "contrastive": (contrastive, 0, None, None, "depends on other rows"),
    "statistics": (centred, 0, None, None, "depends on other rows"),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize(("rows", "microbatches"), ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_that_adds_up_is_let_pass(name, rows, microbatches, dtype):
    loss, ignored, reduction, weigh = MEANS[name]
    output = torch.randn(rows, 3, CLASSES, generator=torch.Generator().manual_seed(2)).to(dtype)
    targets = tokens(ignored=min(ignored, 3 * rows - 1), rows=rows)
    check(loss, targets, reduction=reduction, weigh=weigh, microbatches=microbatches, output=output)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(("rows", "microbatches"), ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_that_does_not_add_up_is_refused_with_the_remedy(name, rows, microbatches, dtype):
    loss, ignored, reduction, weigh, told = WRONG[name]
    output = torch.randn(rows, 3, CLASSES, generator=torch.Generator().manual_seed(2)).to(dtype)
    with pytest.raises(ArgumentError, match=told):
        check(
            loss, tokens(ignored=ignored, rows=rows), reduction=reduction, weigh=weigh, microbatches=microbatches,
            output=output,
        )  # fmt: skip


def test_one_token_in_a_thousand_is_seen():
    targets = torch.zeros(4, 500, dtype=torch.long)
    targets[2, 7] = -100
    with pytest.raises(ArgumentError, match="give weight="):
        check(token_mean, targets, output=torch.randn(4, 500, 3), microbatches=2)


def test_microbatches_that_differ_from_each_other_only_are_seen():
    targets = tokens(ignored=0)
    targets[4:, :1] = -100  # within each microbatch rows are alike
    with pytest.raises(ArgumentError, match="give weight="):
        check(token_mean, targets, microbatches=2)


def test_what_is_one_microbatch_or_accepted_is_not_looked_at():
    check(token_sum, tokens(ignored=0), microbatches=1)
    check(contrastive, tokens(ignored=0), reduction="microbatch")


def test_runs_are_checked_more_and_more_rarely():
    calls = itertools.count()

    def counting(output, y):
        next(calls)
        return token_mean(output, y)

    check(counting, tokens(ignored=0), runs=9)
    assert next(calls) == 4 * 3 * 4  # runs 1, 2, 4 and 8: four microbatches, all rows and two parts


def test_a_run_that_tells_nothing_does_not_count():
    check(squared, tokens(ignored=0), output=torch.zeros(8, 3, CLASSES), runs=2)
    check(squared, tokens(ignored=0), output=torch.full((8, 3, CLASSES), float("inf")))


def noisy(output, y):
    return token_mean(output + torch.randn_like(output), y)


def fixed(output, y):
    if len(output) != 2:
        raise ValueError("two rows")
    return token_mean(output, y)


class Growing(nn.Module):
    """Another loss each time."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, output, y):
        self.factor *= 1.5
        return token_mean(output, y) * self.factor


UNCLEAR = {
    "noise": (noisy, "it draws random numbers"),
    "fixed": (fixed, "two rows"),
    "growing": (Growing(), "does not give the same"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_cannot_be_checked_is_warned_of_once(name):
    loss, told = UNCLEAR[name]
    with pytest.warns(UserWarning, match=told) as caught:
        check(loss, tokens(ignored=0), runs=3)
    assert len(caught) == 1
    check(loss, tokens(ignored=0), reduction="mean")


def test_a_loss_of_the_model_itself_cannot_be_checked():
    def loss(output, _):
        return output["loss"]

    output = {"loss": torch.ones(()), "logits": torch.ones(8, 2)}
    with pytest.warns(UserWarning, match="a loss that the model finds by itself"):
        check(loss, tokens(ignored=0), output=output)


def test_rows_in_another_dimension_are_not_taken_for_a_fault():
    output = torch.randn(2, 8, CLASSES)  # two microbatches of two rows: the first dimension only looks like theirs

    def loss(output, y):
        return functional.cross_entropy(output[0], y[: output.shape[1], 0]) * (1 if len(output) > 1 else 3)

    made = LossCheck(loss, reduction=None, weighted=False, dimensions=lambda _: [1])
    batch = Batch(torch.zeros(4), tokens(ignored=0, rows=4), cut(4, 2), take=taken, named=lambda x: {"x": x})
    made.begin(batch)
    made.look(0, output, batch)
    with pytest.warns(UserWarning, match="cannot check that"):
        made.end()


class Averaging(nn.Module):
    """Has a buffer that each call changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output, y):
        self.seen.add_(len(y))
        return token_mean(output, y)


def test_nothing_is_disturbed():
    loss, targets = Averaging(), tokens(ignored=0)
    output = torch.randn(8, 3, CLASSES, requires_grad=True)
    before, values = torch.get_rng_state(), output.detach().clone()

    def writing(output, y):
        y[y == 0] = 1
        return loss(output.mul_(2), y)

    given = targets.clone()
    check(writing, given, output=output)
    assert torch.equal(given, targets)
    assert torch.equal(output, values)
    assert output.grad is None
    assert torch.equal(before, torch.get_rng_state())


def test_buffers_of_a_loss_are_as_before():
    loss = Averaging()
    check(loss, tokens(ignored=0))
    assert loss.seen == 0


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_it_works_in_evaluation_and_under_autocast(context):
    with context():
        output = torch.randn(8, 3, CLASSES)
        check(token_mean, tokens(ignored=0), output=output)
        with pytest.raises(ArgumentError, match="adds rows up"):
            check(token_sum, tokens(ignored=0), output=output)


def test_structures_of_outputs_and_targets():
    output = {"one": torch.randn(8, 3, CLASSES), "others": (torch.randn(8, 2), None, "name"), "scale": torch.ones(())}
    targets = {"tokens": tokens(ignored=0), "values": torch.randn(8, 2)}

    def loss(output, y):
        return token_mean(output["one"], y["tokens"]) + functional.mse_loss(output["others"][0], y["values"])

    def summed(output, y):
        one = functional.mse_loss(output["others"][0], y["values"], reduction="sum")
        return token_mean(output["one"], y["tokens"]) + one

    def run(loss):
        made = LossCheck(loss, reduction=None, weighted=False, dimensions=lambda _: None)
        batch = Batch(torch.zeros(8), targets, cut(8, 2), take=taken, named=lambda x: {"x": x})
        made.begin(batch)
        for microbatch in range(2):
            made.look(microbatch, taken(output, batch.parts[microbatch]), batch)

    run(loss)
    with pytest.raises(ArgumentError, match="adds rows up"):
        run(summed)


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def model():
    """The same for all ranks, which are threads with one random number generator."""
    return copy.deepcopy(MODEL)


def trained(**settings):
    """Takes two steps on two ranks, and returns the losses and weights, beside those of one process."""
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.randn(10, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    loss = nn.MSELoss(reduction="sum")
    config = cd.PipelineConfig(microbatches=3, split="layers", **settings)

    def make(values):
        return torch.optim.SGD(values, lr=0.01)

    def run(_):
        pipe = cd.Pipeline(model(), config, optimizer=make, loss=loss)
        steps = [pipe.train_batch(x, y) for _ in range(2)]
        return steps, pipe.eval_batch(x, y), pipe.verify_parity(x, y), pipe.state_dict()

    plain, wanted = model(), []
    optimizer = make(plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        found = loss(plain(x), y)
        found.backward()
        optimizer.step()
        wanted.append(found.item())
    return run, (wanted, loss(plain(x), y).item(), plain.state_dict())


@pytest.mark.parametrize("replicas", [1, 2])
def test_sums_train_as_in_one_process(replicas):
    run, (losses, evaluated, weights) = trained(loss_reduction="sum", data_parallel=replicas)
    with local_ranks(2) as ranks:
        for steps, loss, parity, state in ranks.each(run):
            assert steps == pytest.approx(losses, rel=1e-12)
            assert loss == pytest.approx(evaluated, rel=1e-12)
            assert parity < 1e-12
            for name, value in state.items():
                torch.testing.assert_close(value, weights[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sum_that_is_taken_for_a_mean_is_refused_on_all_ranks(replicas):
    run, _ = trained(data_parallel=replicas)
    told = []
    with local_ranks(2) as ranks:

        def body(rank):
            try:
                run(rank)
            except (ArgumentError, PeerError) as error:
                told.append(str(error))

        ranks.each(body)
    assert len(told) == 2
    assert all("adds rows up" in each for each in told)


def test_a_sum_has_no_weight():
    def make(_):
        config = cd.PipelineConfig(loss_reduction="sum")
        with pytest.raises(ArgumentError, match="leave one of them out"):
            cd.Pipeline(model(), config, optimizer=torch.optim.SGD, loss=functional.mse_loss, weight=valid)

    with local_ranks(1) as ranks:
        ranks.each(make)


def test_a_check_that_finds_nothing_wrong_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(token_mean, tokens(ignored=0), runs=4)
