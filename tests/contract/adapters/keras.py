"""Keras, on the backend that ``KERAS_BACKEND`` names: tensors and differentiable operations are those of its plugin."""

from __future__ import annotations

import importlib

import keras
import numpy as np

import coordd.keras as cd
from tests.contract.plugin import NAMES

__all__ = ["PLUGIN"]

_BACKEND = importlib.import_module(f"tests.contract.adapters.{keras.backend.backend()}").PLUGIN


class Keras(type(_BACKEND)):
    """What its optimizer gets nobody overwrites; on PyTorch it computes in single precision whatever it is told."""

    keeps = True
    precision = "float32"
    reductions = (*_BACKEND.reductions, cd.allreduce)

    def view(self, tensor):
        return tensor if isinstance(tensor, np.ndarray) else _BACKEND.view(tensor)

    def training(self, weights, rate):
        return _Training(weights, rate)


class _Small(keras.Model):
    def __init__(self, weights):
        super().__init__()
        self.hidden, self.out = (
            self.add_weight(each.shape, name=name) for name, each in zip(NAMES, weights, strict=True)
        )
        self.set_weights(weights)
        self.frozen = False

    def call(self, x):
        last = keras.ops.stop_gradient(self.out) if self.frozen else self.out
        return keras.ops.matmul(keras.ops.tanh(keras.ops.matmul(x, self.hidden)), last)


class _Watched(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        self.seen = tuple(grads)
        super().apply(grads, trainable_variables)


class _Training:
    """A step of `fit`; outside of graphs, whose gradients nobody sees."""

    def __init__(self, weights, rate):
        self._model = _Small(weights)
        self._model.compile(cd.DistributedOptimizer(_Watched(rate)), "mse", run_eagerly=True)

    def step(self, x, wanted, *, frozen):
        self._model.frozen = frozen
        self._model.train_on_batch(x, wanted)
        return self._model.optimizer.seen

    def weights(self):
        return self._model.get_weights()


PLUGIN = Keras()
