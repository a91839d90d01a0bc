"""Training over epochs."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from coordd.errors import ArgumentError
from coordd_torch.pipeline.fitting import fit


class Seen:
    """Keeps the batches that it gets; the loss is the mean of the inputs."""

    def __init__(self):
        self.batches = []
        self.epochs = 0

    def train_batch(self, x, y):
        assert torch.equal(x * 10, y)
        self.batches.append(x.tolist())
        return float(x.double().mean())

    def eval_batch(self, x, y):
        return float(y.double().mean())


def fitted(rows=10, seen=None, **options):
    seen, out = seen or Seen(), io.StringIO()
    x = torch.arange(rows)
    given = {"epochs": 1, "batch_size": 4, "validation_data": None, "shuffle": False, "seed": 0}
    given |= {"least": 1, "least_evaluated": 1, "ended": lambda: False, "compare": lambda: None}
    history = fit(seen, x, x * 10, console=Console(file=out, width=100), **{**given, **options})
    return seen.batches, history, out.getvalue()


def test_every_row_is_seen_once_in_an_epoch():
    batches, history, told = fitted(epochs=2)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    assert history.loss == [4.5, 4.5]
    assert told.startswith("epoch 1/2: loss 4.5000, ")


def test_rows_come_in_another_order_in_each_epoch_and_the_same_on_all_ranks():
    batches, _, _ = fitted(epochs=2, shuffle=True)
    first, second = ([row for one in batches[start : start + 3] for row in one] for start in (0, 3))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert fitted(epochs=2, shuffle=True)[0] == batches


def test_calls_go_on_where_the_last_one_has_ended():
    seen = Seen()
    for _ in range(2):
        fitted(seen=seen, shuffle=True)
    assert seen.epochs == 2
    assert seen.batches == fitted(epochs=2, shuffle=True)[0]


def test_it_does_not_begin_when_it_is_to_end_already():
    batches, history, _ = fitted(epochs=3, ended=lambda: True)
    assert (len(batches), len(history.loss)) == (0, 0)


def test_it_ends_after_any_step_and_the_epoch_does_not_count():
    seen, told = Seen(), iter([False, False, False, False, True])
    batches, history, _ = fitted(seen=seen, epochs=3, ended=lambda: next(told))
    assert (len(batches), len(history.loss), seen.epochs) == (4, 1, 1)


def test_validation_data_is_gone_through_after_each_epoch():
    x = torch.arange(6)
    _, history, told = fitted(validation_data=(x, x * 10))
    assert history.val_loss == [25.0]
    assert "validation loss 25.0000" in told


def test_a_rest_that_is_too_small_is_left_out():
    batches, _, _ = fitted(least=3)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ArgumentError, match="a batch needs at least 5 rows, and gets 4"):
        fitted(least=5)
    x = torch.arange(6)
    with pytest.raises(ArgumentError, match="a batch of the validation data needs at least 2 rows, and gets 1"):
        fitted(validation_data=(x[:1], x[:1]), least_evaluated=2)
    with pytest.raises(ArgumentError, match="is a pair of inputs and targets, and not 3 things"):
        fitted(validation_data=(x, x, x))
    assert fitted(validation_data=(x[:3], x[:3] * 10), least=4, least_evaluated=3)[1].val_loss == [10.0]
