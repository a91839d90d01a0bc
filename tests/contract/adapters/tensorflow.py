"""TensorFlow: operations at once and in graphs, training in graphs."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import coordd.tensorflow as cd
from coordd_tensorflow import tensors
from tests.contract.plugin import NAMES

__all__ = ["PLUGIN", "TensorFlow"]


class TensorFlow:
    """Its tensors cannot be changed, and its graphs cannot have a gradient in one run and none in the next."""

    dtypes = (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
    shares = keeps = True
    writable = adopts = mends = False
    precision = "float64"
    reductions = (cd.allreduce,)
    allgather = staticmethod(cd.allgather)
    alltoall = staticmethod(cd.alltoall)
    broadcast = staticmethod(cd.broadcast)
    reducescatter = staticmethod(cd.reducescatter)
    tensor = staticmethod(tf.constant)
    view = staticmethod(tensors.view)
    back = staticmethod(tensors.to_tensor)

    def differentiated(self, function, array, upstream):
        def run(tensor):
            with tf.GradientTape() as tape:
                tape.watch(tensor)
                result = function(tensor)
            return result, tape.gradient(result, tensor, output_gradients=tf.constant(upstream))

        found, traced = run(tf.constant(array)), tf.function(run)(tf.constant(array))
        for once, again in zip(found, traced, strict=True):
            np.testing.assert_array_equal(once.numpy(), again.numpy())
        return found

    def training(self, weights, rate):
        return _Training(weights, rate)


class _Training:
    def __init__(self, weights, rate):
        self._weights = [tf.Variable(weight, name=name) for name, weight in zip(NAMES, weights, strict=True)]
        self._rate = rate
        self._run = tf.function(self._traced)

    def step(self, x, wanted, *, frozen):
        return self._run(tf.constant(x), tf.constant(wanted), frozen=frozen)

    def weights(self):
        return [weight.numpy() for weight in self._weights]

    def _traced(self, x, wanted, *, frozen):
        hidden, out = self._weights
        with tf.GradientTape() as tape:
            last = tf.stop_gradient(out) if frozen else out
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ hidden) @ last - wanted))
        gradients = cd.DistributedGradientTape(tape).gradient(loss, self._weights)
        for weight, gradient in zip(self._weights, gradients, strict=True):
            if gradient is not None:
                weight.assign_sub(self._rate * gradient)
        return gradients


PLUGIN = TensorFlow()
