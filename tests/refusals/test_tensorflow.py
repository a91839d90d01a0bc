"""Whatever one rank refuses in a call of `coordd.tensorflow` or `coordd.keras` that all ranks make, the others hear."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest

from tests.local_ranks import local_ranks
from tests.refusals.injection import EVERY, check_all

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    # Of TensorFlow's tensors, by NumPy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def variables(_):
    import tensorflow as tf

    import coordd.tensorflow as cd

    made = [tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])]
    return lambda _: cd.broadcast_variables(made, 0)


def keras_variables(_):
    import keras

    import coordd.keras as cd

    made = [keras.Variable([1.0, 2.0], name="one"), keras.Variable([[3.0]], name="other")]
    return lambda _: cd.broadcast_variables(made, 0)


def partial_optimizer(_):
    import keras

    import coordd.keras as cd

    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    return lambda _: cd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=layer)


CALLS = {"variables": variables, "keras variables": keras_variables, "partial optimizer": partial_optimizer}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("part", [0.05, *EVERY])
def test_the_others_hear_of_a_rank_that_fails_anywhere(name, rank, part):
    assert len(check_all(partial(local_ranks, 2, stall_check=False), CALLS[name], rank, part)) > 5
