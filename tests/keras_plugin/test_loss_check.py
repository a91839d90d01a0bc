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


def look_at_layers(*losses, count=4, in_training=(), **details) -> set[int]:
    """Checks the losses that layers would add, and returns for how many rows they were computed."""
    rows = set()

    def computed(given, masks, training):
        rows.add(len(given[0]))
        return [("bent", float(loss(given[0]))) for loss in (*losses, *(in_training if training else ()))]

    look_at_computed(computed, count, **details)
    return rows


def look_at_computed(computed, count=4, **details) -> None:
    from coordd_keras.pipeline.loss_check import LayerLossCheck

    found, given = LayerLossCheck(computed, **details), batch(count)
    found.begin(given)
    for part in given.parts:
        found.look([OUT[part]], [None])


def test_losses_of_layers_may_be_means_and_constants():
    with warnings.catch_warnings(action="error"):
        assert look_at_layers(lambda x: (x**2).mean(), lambda x: 3.0, lambda x: -(x**2).mean()) == {3, 1, 2}
        assert look_at_layers(in_training=[lambda x: (x**2).mean()]) == {3, 1, 2}
        assert not look_at_layers(lambda x: (x**2).sum(), count=1)  # one microbatch is the whole batch
        assert look_at_layers(lambda x: (x**2).sum(), count=12) == {1}  # single rows tell nothing
        assert look_at_layers(in_training=[]) == {3}


def test_a_loss_that_is_zero_for_a_half_of_the_rows_may_be_a_mean():
    def mean_of_every_third_row(x):
        counted = [row for row in x if (row == OUT[2::3]).all(axis=1).any()]
        return np.square(counted).mean() if counted else 0.0

    with warnings.catch_warnings(action="error"):
        look_at_layers(mean_of_every_third_row)


def test_a_loss_that_is_zero_outside_of_training_is_checked_in_training():
    def computed(given, masks, training):
        return [("bent", float((given[0] ** 2).sum()) if training else 0.0)]

    with pytest.raises(ArgumentError, match="the layer 'bent' adds a loss that sums over rows"):
        look_at_computed(computed)


@pytest.mark.parametrize("declared", [False, True])
def test_losses_of_layers_that_sum_over_rows_are_refused(declared):
    with pytest.raises(ArgumentError, match="the layer 'bent' adds a loss that sums over rows"):
        look_at_layers(lambda x: 3.0, lambda x: (x**2).sum(), declared=declared)
    with pytest.raises(ArgumentError, match="the layer 'bent' adds a loss that sums over rows"):
        look_at_layers(lambda x: 0.0, lambda x: (x**2).sum(), declared=declared)
    with pytest.raises(ArgumentError, match="the layer 'bent' adds a loss that sums over rows"):
        look_at_layers(lambda x: 3.0, in_training=[lambda x: (x**2).sum()], declared=declared)


def test_losses_of_layers_that_are_neither_are_warned_of():
    with pytest.warns(UserWarning, match="the layer 'bent' adds a loss to it that is no mean over rows"):
        look_at_layers(lambda x: x.mean() ** 2)
    with pytest.warns(UserWarning, match="one raises ValueError: cannot reshape"):
        look_at_layers(lambda x: x.reshape(3, 3).mean())
    with warnings.catch_warnings(action="error"):
        look_at_layers(lambda x: x.mean() ** 2, declared=True)


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
