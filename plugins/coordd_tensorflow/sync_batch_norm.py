"""Batch normalization over the batches of all ranks, in Keras on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from coordd import api
from coordd.errors import ArgumentError
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd_tensorflow.operations import allreduce

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable("coordd")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Normalizes by the mean and variance over all ranks' batches; batch sizes may differ.

    Squared distances from the common mean are summed, which avoids cancellation, in at least single precision.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **details: Any) -> None:
        """Creates a layer; ``details`` are the arguments of `keras.layers.BatchNormalization`.

        Args:
            fused: as in Horovod; must be False, because statistics of several ranks cannot be fused.
            process_set: the ranks that take part.
            details: see above.

        Raises:
            ArgumentError: `fused` is set, or Keras does not run on TensorFlow.
        """
        if fused:
            text = "SyncBatchNormalization does not support fused=True: leave it out"
            raise ArgumentError(text)
        if keras.backend.backend() != "tensorflow":
            text = f"SyncBatchNormalization is for Keras on TensorFlow, and this is Keras on {keras.backend.backend()}"
            raise ArgumentError(text)
        super().__init__(**details)
        self.process_set = process_set

    def _moments(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes mean and biased variance of all ranks' unmasked inputs, like Keras."""
        if self.process_set.count(api.size()) == 1:
            plain: tuple[tf.Tensor, tf.Tensor] = super()._moments(inputs, mask)
            return plain
        axes = self._reduction_axes
        if mask is None:
            weights, least = tf.ones_like(inputs), 0.0
        else:
            weights = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), inputs.dtype), tf.shape(inputs))
            least = keras.backend.epsilon()  # Keras adds it if there is a mask
        count, total = self._sums("mean", [tf.reduce_sum(weights, axes), tf.reduce_sum(inputs * weights, axes)])
        count += least
        mean = tf.math.divide_no_nan(total, count)
        shape = [1] * len(inputs.shape)
        shape[self.axis] = -1
        distances = tf.square(inputs - tf.reshape(mean, shape)) * weights
        (squares,) = self._sums("variance", [tf.reduce_sum(distances, axes)])
        return mean, tf.math.divide_no_nan(squares, count)

    def _sums(self, what: str, values: list[tf.Tensor]) -> list[tf.Tensor]:
        name = f"sync_batch_norm.{self.name}.{what}"
        summed = allreduce(tf.stack(values), op=ReduceOp.SUM, name=name, process_set=self.process_set)
        return list(tf.unstack(summed, num=len(values)))
