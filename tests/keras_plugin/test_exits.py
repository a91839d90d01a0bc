"""How ``fit`` of a Keras pipeline ends when one rank does: the others raise soon, and say who and why."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.mpi.launch import launch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
]

# Rank 1 does FAULT as its second epoch begins; the others tell what they hear, and when.
_PROGRAM = """
import os, signal, sys, time
import keras, numpy as np
import coordd.keras as cd

(fault,) = sys.argv[1:]
layers = keras.layers


class Faulty(layers.Dense):
    def call(self, inputs):
        if armed and fault == "layer":
            go_wrong()
        return super().call(inputs)


class Fault(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        global armed
        armed = epoch == 1 and cd.rank() == 1
        if armed and fault != "layer":
            go_wrong()


def go_wrong():
    print(f"at {time.monotonic()}", flush=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        sys.exit(3)
    raise ArithmeticError("an odd epoch")


armed = False
cd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([layers.Dense(4), layers.Dense(4), layers.Dense(4), Faulty(2)])
config = cd.Config(layers_per_proc=[2, 2], microbatches=2)
pipe = cd.Pipeline(model, config, optimizer="sgd", loss="mse")
try:
    pipe.fit(np.ones((24, 4), "float32"), np.ones((24, 2), "float32"), batch_size=8, epochs=3, verbose=0,
             callbacks=[Fault()])
except cd.CoorddError as error:
    print(f"heard {time.monotonic()}", flush=True)
    print(f"{type(error).__name__} {error}", flush=True)
    raise
"""
_ACTION = "the forward pass of microbatch 0 in stage 1"
_SECONDS = 10.0  # the aim is 2; a loaded machine gets more


@pytest.mark.parametrize(
    ("backend", "fault", "told"),
    [
        ("tensorflow", "raise", r"Error rank 1 .*ArithmeticError: an odd epoch"),
        ("torch", "layer", f"PeerError rank 1 failed in 1F0 of the pipeline, {_ACTION}: ArithmeticError: Exception"),
        ("torch", "exit", r"Error rank 1 (called|refused fit at .*:) sys\.exit\(3\)"),
        ("torch", "kill", "died: its connection closed without a goodbye"),
    ],
)
def test_a_rank_that_ends_in_fit_ends_the_others(backend: str, fault: str, told: str) -> None:
    outcome = launch(2, _PROGRAM, fault, launcher="coordd", variables={"KERAS_BACKEND": backend})
    assert outcome.returncode != 0, str(outcome)
    times = dict(line.text.split() for line in outcome.lines if line.text.startswith(("at ", "heard ")))
    assert float(times["heard"]) - float(times["at"]) < _SECONDS, str(outcome)
    assert re.search(told, outcome.of_rank(0)), str(outcome)
