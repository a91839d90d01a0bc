"""Graphs that outlive a session: `init`, training and `shutdown`, several times in one process."""

from __future__ import annotations

import importlib.util

import pytest

from tests.mpi.launch import launch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]

_SESSIONS = """
import tensorflow as tf
import coordd.tensorflow as cd

held = [tf.Variable(tf.ones([3, 2]))]

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x @ held[0])
    for variable, gradient in zip(held, cd.DistributedGradientTape(tape).gradient(loss, held)):
        variable.assign_sub(0.125 * gradient)

for session in range(4):
    cd.init()
    short = session > 0 and cd.rank() == 0  # in the second session this rank alone traces the graph again
    step(tf.ones([2 if short else 4, 3]))
    cd.shutdown()
print("weights", held[0][0, 0].numpy())
"""


def test_a_graph_that_one_rank_alone_traced_again_works_in_later_sessions() -> None:
    outcome = launch(2, _SESSIONS, launcher="coordd")
    assert outcome.returncode == 0, str(outcome)
    assert outcome.stdout.count("weights -0.625") == 2, str(outcome)
