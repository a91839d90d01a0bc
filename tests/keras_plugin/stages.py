"""Models in stages and in one piece, with the same weights on all ranks and backends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np
from keras import layers

import coordd.keras as cd

__all__ = [
    "MODELS",
    "chain",
    "close",
    "cross_entropy",
    "data",
    "doubles",
    "plain",
    "same",
    "seeded",
    "sgd",
    "staged",
    "tied",
]


@contextmanager
def doubles() -> Iterator[None]:
    policy, kind = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(kind)
        keras.config.set_dtype_policy(policy)


def chain() -> keras.Model:
    tanh = [layers.Dense(6, activation="tanh") for _ in range(6)]
    return keras.Sequential([layers.Flatten(), *tanh, layers.Dense(3)])


def skips() -> keras.Model:
    """Two inputs, a value that skips stages, an addition, and a layer without weights."""
    one, other = keras.Input((2, 3), name="one"), keras.Input((4,), name="other")
    start = layers.Flatten()(one)
    hidden = layers.Dense(6, activation="tanh")(start)
    for _ in range(3):
        hidden = layers.Dense(6, activation="tanh")(hidden)
    joined = layers.Concatenate()([hidden, start, other]) * 2.0
    return keras.Model([one, other], layers.Dense(3)(layers.Dense(5, activation="tanh")(joined) + 1.0))


def tied() -> keras.Model:
    """A layer that is called at both ends, and one that has another's weights."""
    seen = keras.Input((2, 3))
    again = layers.Dense(6, activation="tanh", name="again")
    hidden = again(layers.Flatten()(seen))
    for _ in range(4):
        hidden = layers.Dense(6, activation="tanh")(hidden)
    return keras.Model(seen, layers.Dense(3)(again(hidden)))


def shared() -> keras.Model:
    """Layers with and without weights whose first call is read behind the cut as well as their second."""
    seen = keras.Input((2, 3))
    bent, again = layers.Activation("tanh"), layers.Dense(6, name="again")
    first = bent(again(layers.Flatten()(seen)))
    return keras.Model(seen, layers.Dense(3)(layers.Add()([bent(again(layers.Dense(6)(first))), first])))


MODELS = {"chain": chain, "skips": skips, "tied": tied, "shared": shared}


def seeded(make) -> keras.Model:
    """Weights that are equal on all ranks and backends."""
    model = make()
    if not model.built:
        model.build((None, 2, 3))
    random = np.random.default_rng(1)
    model.set_weights([random.normal(size=weight.shape) / 2 for weight in model.weights])
    return model


def data(name: str, rows: int) -> tuple:
    random = np.random.default_rng(2)
    x = random.normal(size=(rows, 2, 3))
    y = random.integers(0, 3, rows)
    return ([x, random.normal(size=(rows, 4))] if name == "skips" else x), y


def cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # in the precision of this moment


def sgd(**details) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.3, momentum=0.9, **details)


def staged(model, optimizer=None, **settings) -> cd.Pipeline:
    settings = {"microbatches": 4, "split": "layers", **settings}
    return cd.Pipeline(
        model, cd.Config(**settings), optimizer=optimizer or sgd(), loss=cross_entropy(), metrics=["accuracy"]
    )


def plain(model: keras.Model, optimizer=None) -> keras.Model:
    model.compile(optimizer or sgd(), cross_entropy(), metrics=["accuracy"])
    return model


def same(one: keras.Model, other: keras.Model, exact: float = 0.0) -> None:
    close(one.get_weights(), other.get_weights(), exact)


def close(mine: list, expected: list, exact: float = 0.0) -> None:
    """By default as close as Keras computes in float64: on PyTorch it takes sums in float32."""
    exact = exact or (1e-6 if "torch" in cd.allgather_object(keras.backend.backend()) else 1e-11)
    for one, other in zip(mine, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=exact, atol=exact)
