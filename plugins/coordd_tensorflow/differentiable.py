"""Wraps the operations of `coordd.daemon.autograd_rules` in TensorFlow custom gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordd.daemon.autograd_rules import Differentiable
from coordd.errors import ArgumentError
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
            return _backward(operation, kept, upstream[:-1], values)

        return (*results, kept), gradient

    found: list[tf.Tensor] = list(run(*tensors))
    return found[:-1], found[-1]


def _backward(
    operation: Differentiable, kept: tf.Tensor, upstream: Sequence[Any], values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the gradients of the values, in such a way that an outer tape can differentiate them."""

    @tf.custom_gradient
    def run(*gradients: tf.Tensor) -> tuple[Any, Any]:
        found = _called(operation.backward, kept, gradients, values)

        def double(*outer: tf.Tensor) -> list[tf.Tensor]:
            return _double_backward(operation, kept, outer, gradients)

        return tuple(found), double

    return list(run(*map(tf.convert_to_tensor, upstream)))


def _double_backward(
    operation: Differentiable, kept: tf.Tensor, upstream: Sequence[Any], values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    @tf.custom_gradient
    def run(*gradients: tf.Tensor) -> tuple[Any, Any]:
        return tuple(_called(operation.double_backward, kept, gradients, values)), _refuse

    return list(run(*map(tf.convert_to_tensor, upstream)))


def _refuse(*_: tf.Tensor) -> Any:
    text = "operations between ranks have no third derivatives here: compute them of a model on one rank"
    raise ArgumentError(text)


def _called(
    function: Callable[..., Sequence[np.ndarray]],
    kept: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Calls a function that returns an array of the shape and type of each value."""
    found: list[tf.Tensor] = call(function, [kept, *gradients], [value.dtype for value in values])
    for each, value in zip(found, values, strict=True):
        each.set_shape(value.shape)
    return found


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
