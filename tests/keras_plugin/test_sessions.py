"""An optimizer of an earlier session is still used after `shutdown` and `init`, beside a new one."""

from __future__ import annotations

import importlib.util

import pytest

from tests.mpi.launch import launch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
]

# Each rank prints the averaged gradients of both models; their order in one backward pass differs between ranks.
_PROGRAM = """
import keras, torch
import coordd.keras as cd

def made(name):
    layer = keras.layers.Dense(2, kernel_initializer="ones", use_bias=False, name=name)
    model = keras.Sequential([keras.layers.Input((3,)), layer])
    optimizer = cd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(model.trainable_variables)
    return model, optimizer

cd.init()
old, first = made("old")
cd.shutdown()
cd.init()
new, second = made("new")
x = torch.ones(1, 3)
held = [object() for _ in range(1000 * cd.rank())]
pairs = [(old, 1), (new, 100)]
for step in range(8):
    for model, _ in pairs:
        for variable in model.trainable_variables:
            variable.value.grad = None
    sum(model(x).sum() * factor for model, factor in pairs).backward()
    found = [float(model.trainable_variables[0].value.grad[0, 0]) for model, _ in pairs]
    assert found == [1.0, 100.0], (step, found)
"""


def test_the_gradients_of_an_old_and_a_new_optimizer_are_not_mixed_up():
    outcome = launch(2, _PROGRAM, launcher="coordd", variables={"KERAS_BACKEND": "torch"})
    assert outcome.returncode == 0, str(outcome)
