"""A Keras pipeline adds up the losses of microbatches; it refuses those that are no weighted mean over rows."""

from __future__ import annotations

import importlib.util
import warnings

import numpy as np
import pytest

from coordd.errors import ArgumentError
from coordd.pipeline.batch import Batch
from tests.mpi.launch import launch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")

RNG = np.random.default_rng(0)
OUT, TARGETS = RNG.normal(size=(12, 3)), RNG.normal(size=(12, 3))
COUNTS = np.arange(12.0) % 5


def squares(out, masks, targets):
    return (out[0] - targets) ** 2


def mean(*given):
    return float(squares(*given).mean())


def added(*given):
    return float(squares(*given).sum())


def mixed(out, masks, targets):
    return float(((out[0] - out[0].mean(axis=0)) ** 2).mean())


def masked(out, masks, targets):
    return float((squares(out, masks, targets) * masks[0][:, None]).sum() / masks[0].sum())


def batch(count: int, weigh=None) -> Batch:
    rows = 12 // count
    parts = [slice(start, start + rows) for start in range(0, 12, rows)]
    return Batch(OUT, TARGETS, parts, take=lambda values, part: values[part], named=lambda x: {"0": x}, weigh=weigh)


def look(judge, count=4, *, weigh=None, outputs=OUT, mask=None, **details) -> None:
    from coordd_keras.pipeline.loss_check import LossCheck

    found = LossCheck(judge, weighted=weigh is not None, **details)
    given = batch(count, weigh)
    found.begin(given)
    for number, part in enumerate(given.parts):
        found.look(number, [outputs[part]], [None if mask is None else mask[part]], given)


@pytest.mark.parametrize("count", [1, 4, 12])
def test_means_over_rows_are_taken(count):
    with warnings.catch_warnings(action="error"):
        look(mean, count)
        look(lambda *given: mean(*given) + 3.0, count)
        look(lambda *given: 0.0, count)


@pytest.mark.parametrize("count", [4, 12])
@pytest.mark.parametrize(("judge", "told"), [(added, "adds rows up"), (mixed, "give weight=")])
def test_what_is_no_mean_is_refused(judge, told, count):
    look(judge, 1)  # one microbatch is the whole batch
    with pytest.raises(ArgumentError, match=told):
        look(judge, count)


@pytest.mark.parametrize("count", [4, 12])
def test_a_mean_over_what_masks_leave_needs_its_weight(count):
    mask = COUNTS > 1
    with pytest.raises(ArgumentError, match="rows do not count equally, as with masks"):
        look(masked, 2, mask=mask)

    def weigh(inputs, targets):
        return mask[[int(np.flatnonzero((row == OUT).all(axis=1))[0]) for row in inputs]].sum()

    look(masked, count, mask=mask, weigh=weigh)
    with pytest.raises(ArgumentError, match="no mean by weight="):
        look(mean, 2, weigh=weigh)


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        (lambda *_: 1 / 0, "with 3 rows it raises ZeroDivisionError"),
        (lambda *_: float(RNG.normal()), "not give the same each time"),
    ],
)
def test_what_cannot_be_checked_is_warned_of(judge, told):
    with pytest.warns(UserWarning, match=told):
        look(judge)
    with warnings.catch_warnings(action="error"):
        look(judge, declared=True)


def test_outputs_without_rows_are_warned_of():
    with pytest.warns(UserWarning, match="no row for each row"):
        look(mean, outputs=OUT[:4])


def look_at_layers(*losses, count=4, training=True, **details) -> set[int]:
    """Checks the losses that layers would add, and returns for how many rows they were computed.

    Each loss gets the rows, and whether they are those of training.
    """
    rows = set()

    def computed(samples, training):
        rows.update(len(values[0]) for values, _ in samples)
        found = [
            [("bent", value) for loss in losses if (value := loss(x, training)) is not None] for (x,), _ in samples
        ]
        return Added(found, changed=details_changed)

    from coordd_keras.pipeline.loss_check import Added, LayerLossCheck

    details_changed = details.pop("changed", False)
    found, given = LayerLossCheck(computed, training=training, **details), batch(count)
    found.begin(given)
    for part in given.parts:
        found.look([OUT[part]], [None])
    return rows


def mean_square(x, training):
    return float((x**2).mean())


def sum_of_squares(x, training):
    return float((x**2).sum())


def square_of_mean(x, training):
    return float(x.mean() ** 2)


def only(training, loss):
    """Limits a loss to training, or to evaluation."""
    return lambda x, mode: loss(x, mode) if mode is training else None


def zero_outside_of_training(loss):
    return lambda x, training: loss(x, training) if training else 0.0


def random(loss):
    """A loss behind dropout."""
    return lambda x, training: loss(x, training) * (RNG.uniform(0.5, 1.5) if training else 1.0)


def in_training_and_outside(trained, evaluated):
    return lambda x, training: (trained if training else evaluated)(x, training)


def mean_of_every_third_row(x, training):
    counted = [row for row in x if (row == OUT[2::3]).all(axis=1).any()]
    return float(np.square(counted).mean()) if counted else 0.0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [4, 12])
def test_losses_of_layers_may_be_means_and_constants(count, training):
    with warnings.catch_warnings(action="error"):
        rows = look_at_layers(
            mean_square, lambda *_: 3.0, lambda *given: -mean_square(*given), count=count, training=training
        )
        assert rows == ({3, 1, 2} if count == 4 else {1, 2})
        assert look_at_layers(only(training, mean_square), training=training) == {3, 1, 2}
        assert not look_at_layers(sum_of_squares, count=1)  # one microbatch is the whole batch
        assert look_at_layers(training=training) == {3}
        look_at_layers(random(mean_square), training=training)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        sum_of_squares,
        only(True, sum_of_squares),
        zero_outside_of_training(sum_of_squares),
        random(sum_of_squares),
        in_training_and_outside(sum_of_squares, mean_square),
    ],
)
@pytest.mark.parametrize("count", [4, 12])
def test_losses_of_layers_that_sum_over_rows_are_refused(loss, declared, count):
    for others in ([], [lambda *_: 3.0], [lambda *_: 0.0]):
        with pytest.raises(ArgumentError, match="the layer 'bent' adds a loss that sums over rows"):
            look_at_layers(*others, loss, declared=declared, count=count)


def test_sums_outside_of_training_are_refused_in_evaluation():
    look_at_layers(only(False, sum_of_squares))
    with pytest.raises(ArgumentError, match="the layer 'bent' adds a loss that sums over rows"):
        look_at_layers(only(False, sum_of_squares), training=False)


@pytest.mark.parametrize(
    "loss",
    [
        square_of_mean,
        random(square_of_mean),
        in_training_and_outside(square_of_mean, mean_square),
        zero_outside_of_training(random(mean_square)),
        mean_of_every_third_row,
    ],
)
def test_losses_of_layers_that_are_neither_are_warned_of(loss):
    with pytest.warns(UserWarning, match="the layer 'bent' adds a loss to it that is no mean over rows"):
        look_at_layers(loss)
    with warnings.catch_warnings(action="error"):
        look_at_layers(loss, declared=True)


def test_losses_of_layers_that_cannot_be_computed_are_warned_of():
    with pytest.warns(UserWarning, match="one raises ValueError: cannot reshape"):
        look_at_layers(lambda x, _: float(x.reshape(3, 3).mean()))


def test_rows_of_different_runs_are_not_compared():
    """Batches of sequences have other lengths each."""
    from coordd_keras.pipeline.loss_check import Added, LayerLossCheck

    def computed(samples, training):
        return Added([[("bent", mean_square(x, training))] for (x,), _ in samples], changed=False)

    found = LayerLossCheck(computed, training=True)
    with warnings.catch_warnings(action="error"):
        for length in (5, 7, 9, 6):
            found.begin(batch(12))
            for row in RNG.normal(size=(12, 1, length)):
                found.look([row], [None])


def test_losses_behind_statistics_of_rows_are_judged_as_outside_of_training():
    """As of batch normalisation, which changes what later layers get in training."""
    loss = in_training_and_outside(square_of_mean, mean_square)
    with warnings.catch_warnings(action="error"):
        look_at_layers(loss, changed=True)


_PROGRAM = """
import sys
import keras, numpy as np
import coordd.keras as cd


class Adds(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.sum(keras.ops.square(inputs)))
        return inputs


def total(y, p):
    return keras.ops.sum(keras.ops.square(y - p))


(place,) = sys.argv[1:]
cd.init()
dense = keras.layers.Dense
model = keras.Sequential([
    keras.Input((4,)), dense(4, kernel_initializer="ones"), *([Adds()] if place == "layer" else []),
    dense(3, kernel_initializer="ones"),
    dense(2, kernel_initializer="ones", activity_regularizer="l2" if place == "regularized" else None),
])
loss = "mse" if place == "layer" else total
config = cd.PipelineConfig(microbatches=4, layers_per_proc=[len(model.layers) - 1, 1])
pipe = cd.Pipeline(model, config, optimizer="sgd", loss=loss)
pipe.fit(np.ones((12, 4), "float32"), np.ones((12, 2), "float32"), batch_size=12, verbose=0)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize(
    ("place", "rank", "told"),
    [
        ("loss", 1, "loss= adds rows up"),
        ("regularized", 1, "loss= adds rows up"),
        ("layer", 0, "the layer 'adds' adds a loss that sums over rows"),
    ],
)
def test_losses_that_add_rows_up_are_refused_on_all_ranks(backend, place, rank, told):
    outcome = launch(2, _PROGRAM, place, launcher="coordd", variables={"KERAS_BACKEND": backend})
    assert outcome.returncode != 0, str(outcome)
    assert f"ArgumentError: {told}" in outcome.of_rank(rank), str(outcome)
    assert f"PeerError: rank {rank}" in outcome.of_rank(1 - rank), str(outcome)
