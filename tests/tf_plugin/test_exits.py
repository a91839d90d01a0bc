"""How training in TensorFlow's graphs ends when a rank leaves: that rank is the cause."""

from __future__ import annotations

import importlib.util

import pytest

from tests.mpi.launch import launch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]

_UNEVEN = """
import tensorflow as tf
import coordd.tensorflow as cd

cd.init()
weight = tf.Variable([1.0, 2.0])


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * x)
    (gradient,) = cd.DistributedGradientTape(tape).gradient(loss, [weight])
    weight.assign_sub(0.1 * gradient)


for _ in range(3 + cd.rank()):
    step(tf.ones(2))
"""


def test_a_rank_with_a_batch_too_few_is_the_cause_though_tensorflow_wraps_the_error() -> None:
    outcome = launch(2, _UNEVEN, launcher="coordd")
    assert outcome.returncode == 1, str(outcome)
    last = outcome.stderr.splitlines()[-1]
    cause = "it left the job while others still waited for 'gradients.0'"
    assert last.startswith(f"coordd: rank 0 exited with code 1: {cause}"), str(outcome)
