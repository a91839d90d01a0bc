"""Wraps the operations of `coordd.daemon.autograd_rules` in TensorFlow custom gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordd.daemon.autograd_rules import Differentiable
from coordd_tensorflow.graph import call

__all__ = ["derived", "differentiable"]


def differentiable(
    operation: Differentiable, tensors: Sequence[tf.Tensor], extras: Sequence[tf.Tensor] = ()
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Runs an operation so that gradients flow back through it.

    Args:
        operation: the operation.
        tensors: its differentiable inputs.
        extras: further inputs, without gradients.

    Returns:
        the results, and the tensor that the operation saved for backward.
    """

    def forward(*arrays: np.ndarray) -> list[np.ndarray]:
        results, kept = operation.forward(*arrays)
        return [*results, kept]

    @tf.custom_gradient
    def run(*values: tf.Tensor) -> tuple[Any, Any]:
        *results, kept = call(forward, [*values, *extras], [*(value.dtype for value in values), tf.int64])
        for result, value in zip(results, values, strict=True):
            if not operation.ragged:
                result.set_shape(value.shape)
            elif value.shape.rank is not None:
                result.set_shape([None, *value.shape[1:]])

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            operation.check()
            dense = [tf.convert_to_tensor(each) for each in upstream[:-1]]
            found: list[tf.Tensor] = call(operation.backward, [kept, *dense], [value.dtype for value in values])
            for each, value in zip(found, values, strict=True):
                each.set_shape(value.shape)
            return found

        return (*results, kept), gradient

    found: list[tf.Tensor] = list(run(*tensors))
    return found[:-1], found[-1]


def derived(
    own: Sequence[tf.Tensor], reduced: Sequence[tf.Tensor], reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """Makes reduced tensors depend on this rank's inputs for an outer tape, for example for second derivatives.

    Args:
        own: this rank's inputs.
        reduced: the results, in the same order.
        reduce: reduces the results' gradients in the same manner; all ranks call it.
    """

    @tf.custom_gradient
    def run(*values: tf.Tensor) -> tuple[Any, Any]:
        return list(reduced), lambda *upstream: reduce([tf.convert_to_tensor(each) for each in upstream])

    found: list[tf.Tensor] = list(run(*own))
    return found
