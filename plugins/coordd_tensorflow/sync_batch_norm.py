"""Batch normalisation over the batches of all ranks, in Keras on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from coordd import api
from coordd.errors import ArgumentError
from coordd.messages import ReduceOp
from coordd.process_sets import ProcessSet, global_process_set
from coordd_tensorflow.operations import allreduce

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable("coordd")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Normalises by the mean and variance of all ranks' batches together; batches may differ in size.

    Squares are summed around the common mean, so that nothing cancels out, in at least single precision.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **details: Any) -> None:
        """Makes a layer; ``details`` are the arguments of `keras.layers.BatchNormalization`.

        Args:
            fused: Horovod's; statistics of several ranks cannot be fused.
            process_set: the ranks that take part.
            details: see above.

        Raises:
            ArgumentError: it is to be fused, or Keras does not run on TensorFlow.
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
        """Computes the mean and biased variance of all ranks' inputs, where they are not masked; as Keras does."""
        if self.process_set.count(api.size()) == 1:
            plain: tuple[tf.Tensor, tf.Tensor] = super()._moments(inputs, mask)
            return plain
        axes = self._reduction_axes
        if mask is None:
            weights, least = tf.ones_like(inputs), 0.0
        else:
            weights = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), inputs.dtype), tf.shape(inputs))
            least = keras.backend.epsilon()  # Keras adds it where there is a mask
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
