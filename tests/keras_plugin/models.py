"""Small models and their data, equal on all ranks and backends."""

from __future__ import annotations

import keras
import numpy as np

import coordd.keras as cd

__all__ = ["BATCH", "alone", "data", "mine", "model", "same", "together"]

BATCH = 4
"""Examples of one rank in one step."""


def model(seed: int = 0) -> keras.Model:
    """A classifier of vectors of eight numbers into three classes; equal on all ranks and backends."""
    built = keras.Sequential(
        [
            keras.layers.Dense(16, activation="tanh", name="first"),
            keras.layers.Dense(3, name="last"),
        ],
        name="small",
    )
    built.build((None, 8))
    random = np.random.default_rng(seed)
    built.set_weights([random.normal(size=weight.shape).astype("float32") / 3 for weight in built.weights])
    return built


def data(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The batches of all ranks, one behind the other, for so many steps."""
    random = np.random.default_rng(1)
    count = steps * BATCH * cd.size()
    return random.normal(size=(count, 8)).astype("float32"), random.integers(0, 3, count)


def mine(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's part of each batch."""
    x, y = data(steps)
    part = np.arange(len(x)) // BATCH % cd.size() == cd.rank()
    return x[part], y[part]


def compiled(optimizer: keras.optimizers.Optimizer, **details) -> keras.Model:
    found = model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found.compile(optimizer, loss, metrics=["accuracy"], **details)
    return found


def alone(optimizer: keras.optimizers.Optimizer, steps: int, **details) -> keras.Model:
    """What one process makes of the batches of all ranks."""
    found = compiled(optimizer, **details)
    x, y = data(steps)
    found.fit(x, y, batch_size=BATCH * cd.size(), shuffle=False, verbose=0)
    return found


def together(optimizer: keras.optimizers.Optimizer, steps: int, callbacks=None, **details) -> keras.Model:
    """What the ranks make of them."""
    found = compiled(optimizer, **details)
    x, y = mine(steps)
    found.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    return found


def same(one: keras.Model, other: keras.Model, exact: float = 1e-5) -> None:
    """Compares the weights of two models."""
    for mine_, expected in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine_, expected, rtol=exact, atol=exact)
