"""Wraps the operations of `coordd.daemon.autograd_rules` in TensorFlow custom gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops

from coordd.daemon.autograd_rules import Differentiable
from coordd.errors import ArgumentError
from coordd_tensorflow.graph import call

__all__ = ["derived", "differentiable"]


def differentiable(
    operation: Differentiable, tensors: Sequence[tf.Tensor], extras: Sequence[tf.Tensor] = ()
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Runs an operation so that gradients flow back through it, and gradients of these gradients.

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

    def rule(inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], upstream: Sequence[Any]) -> list[Any]:
        operation.check()
        values = inputs[: len(tensors)]
        found = _backward(operation, outputs[-1], _present(upstream[:-1], outputs), values)
        return [*found, *([None] * len(extras))]

    *results, kept = _recorded(forward, [*tensors, *extras], [*(each.dtype for each in tensors), tf.int64], rule)
    for result, value in zip(results, tensors, strict=True):
        if not operation.ragged:
            result.set_shape(value.shape)
        elif value.shape.rank is not None:
            result.set_shape([None, *value.shape[1:]])
    return results, kept


def _backward(
    operation: Differentiable, kept: tf.Tensor, gradients: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    def rule(inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], upstream: Sequence[Any]) -> list[Any]:
        return [None, *_double_backward(operation, inputs[0], _present(upstream, outputs), inputs[1:])]

    return _shaped(_recorded(operation.backward, [kept, *gradients], [each.dtype for each in values], rule), values)


def _double_backward(
    operation: Differentiable, kept: tf.Tensor, gradients: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    found = _recorded(operation.double_backward, [kept, *gradients], [each.dtype for each in values], _third)
    return _shaped(found, values)


def _third(inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], upstream: Sequence[Any]) -> list[Any]:
    """Refuses a third derivative that is not zero; TensorFlow asks for more derivatives of a function than it uses."""

    def refuse(*arrays: np.ndarray) -> list[np.ndarray]:
        if any(array.any() for array in arrays[len(inputs) :]):
            text = "operations between ranks have no third derivatives here: compute them of a model on one rank"
            raise ArgumentError(text)
        return [np.zeros_like(array) for array in arrays[1 : len(inputs)]]

    given = [*inputs, *_present(upstream, outputs)]
    return [None, *call(refuse, given, [each.dtype for each in inputs[1:]], waits=False)]


def _present(upstream: Sequence[Any], outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns upstream gradients as dense tensors: zeros where there is none."""
    return [
        tf.zeros_like(output) if each is None else tf.convert_to_tensor(each)
        for each, output in zip(upstream, outputs, strict=False)
    ]


def _shaped(found: list[tf.Tensor], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    for each, value in zip(found, values, strict=True):
        each.set_shape(value.shape)
    return found


def _recorded(
    function: Callable[..., Sequence[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], rule: Any
) -> list[tf.Tensor]:
    """Calls a function on arrays, and records how its results are differentiated.

    In a graph the rule gets the inputs of an operation that passes on the results and the inputs of the call. So it has
    them wherever TensorFlow builds the gradient: custom gradients inside custom gradients fail in called graphs.
    """
    if tf.executing_eagerly():
        return _recorded_eagerly(function, inputs, dtypes, rule)
    given, name, count = [*inputs], f"coordd.{ops.uid()}", len(dtypes)

    @tf.RegisterGradient(name)
    @tf.autograph.experimental.do_not_convert
    def gradient(passing: Any, *upstream: Any) -> list[Any]:
        if passing is None:  # the function is being saved
            return [*([None] * count), *rule(given, called, upstream[:count])]
        tensors = [*passing.inputs]
        return [*([None] * count), *rule(tensors[count:], tensors[:count], upstream[:count])]

    with record.stop_recording():
        called = call(function, given, dtypes)
        with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": name}):
            found: list[tf.Tensor] = tf.identity_n([*called, *given])[:count]
    record.record_operation(name, found, given, lambda *upstream: rule(given, called, upstream))  # for tapes
    return found


def _recorded_eagerly(
    function: Callable[..., Sequence[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], rule: Any
) -> list[tf.Tensor]:
    @tf.custom_gradient
    def run(*given: tf.Tensor) -> tuple[Any, Any]:
        found = call(function, given, dtypes)

        def gradient(*upstream: Any) -> list[Any]:
            gradients: list[Any] = rule(given, found, upstream)
            return gradients

        return tuple(found), gradient

    return list(run(*inputs))


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
