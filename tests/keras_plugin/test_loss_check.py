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


_PROGRAM = """
import keras, numpy as np
import coordd.keras as cd

cd.init()
dense = keras.layers.Dense
model = keras.Sequential([keras.Input((4,)), dense(4, kernel_initializer="ones"), dense(2, kernel_initializer="ones")])
total = lambda y, p: keras.ops.sum(keras.ops.square(y - p))
pipe = cd.Pipeline(model, cd.PipelineConfig(microbatches=4), optimizer="sgd", loss=total)
pipe.fit(np.ones((12, 4), "float32"), np.ones((12, 2), "float32"), batch_size=12, verbose=0)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_function_that_adds_rows_up_is_refused_on_all_ranks(backend):
    outcome = launch(2, _PROGRAM, launcher="coordd", variables={"KERAS_BACKEND": backend})
    assert outcome.returncode != 0, str(outcome)
    assert "ArgumentError: loss= adds rows up" in outcome.of_rank(1), str(outcome)
    assert "PeerError: rank 1" in outcome.of_rank(0), str(outcome)
