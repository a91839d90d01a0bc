"""Whatever one rank refuses in a call of `coordd.keras` or `coordd.tensorflow` that all make, the other ranks hear."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest

from tests.local_ranks import local_ranks
from tests.refusals.injection import EVERY, check_all

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
    # Of TensorFlow's tensors, by NumPy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def optimizer(_):
    import keras

    import coordd.keras as cd

    return cd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)


def pipeline(_):
    import keras

    import coordd.keras as cd

    layers = [keras.layers.Dense(2, kernel_initializer="ones") for _ in range(2)]  # ranks are threads: no global seed
    model = keras.Sequential([keras.Input((2,)), *layers])
    return cd.Pipeline(model, cd.Config(microbatches=2), optimizer="sgd", loss="mse")


def partial_optimizer(_):
    import keras

    import coordd.keras as cd

    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    return cd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=layer)


def keras_variables(_):
    import keras

    import coordd.keras as cd

    cd.broadcast_variables([keras.Variable([1.0, 2.0], name="one"), keras.Variable([[3.0]], name="other")], 0)


def variables(_):
    import tensorflow as tf

    import coordd.tensorflow as cd

    cd.broadcast_variables([tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])], 0)


def of_pipeline(call, *, first=False):
    """Makes a pipeline, which has seen a batch already unless the call is to be the ``first``, and what to call."""

    def make(_):
        import numpy as np

        pipe = pipeline(None)
        rows, targets = np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)
        if not first:
            pipe.train_on_batch(rows, targets)
        return lambda _: call(pipe, rows, targets)

    return make


def fit(pipe, rows, targets):
    pipe.fit(rows, targets, batch_size=4, verbose=0, validation_data=(rows, targets))


METHODS = {
    "first fit": of_pipeline(fit, first=True),
    "fit": of_pipeline(fit),
    "evaluate": of_pipeline(lambda pipe, rows, targets: pipe.evaluate(rows, targets)),
    "predict": of_pipeline(lambda pipe, rows, _: pipe.predict(rows)),
}
TWO = partial(local_ranks, 2, stall_check=False)
CALLS = {
    "optimizer": optimizer,
    "partial optimizer": partial_optimizer,
    "pipeline": pipeline,
    "variables of Keras": keras_variables,
    "variables of TensorFlow": variables,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("part", [0.1, *EVERY])
def test_the_others_hear_of_a_rank_that_fails_anywhere(name, part):
    assert len(check_all(TWO, lambda _: CALLS[name], 1, part)) > 5


# An error within the check of the loss is a warning, on the rank of the last stage, and training goes on.
@pytest.mark.filterwarnings("ignore:coordd takes the loss for.*InjectedError:UserWarning")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("part", [0.005, *EVERY])
def test_the_others_hear_of_a_rank_that_fails_anywhere_in_a_method(name, rank, part):
    """An error within the passes of a step ends the job, and they hear that."""
    assert len(check_all(TWO, METHODS[name], rank, part)) > 10


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["save", "save_weights"])
@pytest.mark.parametrize("part", [0.05, *EVERY])
def test_the_others_hear_of_a_rank_that_fails_anywhere_while_all_save(name, rank, part, tmp_path):
    path = tmp_path / ("saved.keras" if name == "save" else "saved.weights.h5")
    make = of_pipeline(lambda pipe, *_: getattr(pipe, name)(path))
    assert len(check_all(TWO, make, rank, part)) > 5
