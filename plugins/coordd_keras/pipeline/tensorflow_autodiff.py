"""Keras stages on TensorFlow: compiled graphs, with a gradient tape for each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from coordd.pipeline.storage import laid
from coordd.transport.shared_memory.loans import blank
from coordd_keras.pipeline.autodiff import Call, Computation, Result
from coordd_tensorflow.tensors import check_dense, to_tensor, view

__all__ = ["TensorFlowAutodiff", "TensorFlowCodec", "make"]


@dataclass(frozen=True)
class TensorFlowCodec:
    """Implements `coordd.pipeline.frame.Codec` for TensorFlow.

    Attributes:
        blank: allocates memory for frames.
    """

    blank: Callable[[int], np.ndarray] = field(default=blank)

    def is_tensor(self, value: object) -> bool:
        """Returns whether a value is a tensor."""
        return isinstance(value, (tf.Tensor, tf.IndexedSlices))

    def differentiable(self, tensor: Any) -> bool:
        """Returns whether gradients flow through a tensor."""
        return bool(tensor.dtype.is_floating)

    def array(self, tensor: Any) -> np.ndarray:
        """Returns a view of a tensor's values."""
        return view(check_dense(tensor))

    def tensor(self, array: np.ndarray, *, differentiable: bool) -> Any:
        """Converts an array to a tensor."""
        lying, axes = laid(array)
        found = to_tensor(lying)
        return found if axes == tuple(range(lying.ndim)) else tf.transpose(found, axes)


class _Weights:
    """Implements `coordd.pipeline.versions.Weights`; TensorFlow copies held values before it changes them."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = variables

    def held(self) -> list[tf.Tensor]:
        """Returns the variables' values."""
        return [variable.value.read_value() for variable in self._variables]

    def put(self, values: Sequence[tf.Tensor]) -> None:
        """Assigns the values."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def renew(self) -> None:
        """Does nothing, because TensorFlow copies held values before it changes them."""


@dataclass
class _Kept:
    tape: tf.GradientTape
    entered: list[tf.Tensor]


class TensorFlowAutodiff:
    """Runs a traced ``tf.function`` for each kind of call; see `coordd_keras.pipeline.autodiff.Autodiff`."""

    def __init__(self, computation: Computation, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self.codec = TensorFlowCodec()
        self.weights = _Weights(self._variables)
        self._computation = computation
        self._compute: Callable[[Call], Result] = self.compiled(computation)

    def prepare(self, call: Call) -> None:
        """Lets Keras create its variables, which cannot be created inside a graph."""
        self._computation.prepare(_tensors(call))

    def run(self, call: Call) -> Result:
        """Runs a forward pass without recording it."""
        return self._compute(_tensors(call))

    def record(self, call: Call, entering: Sequence[int]) -> tuple[Result, _Kept]:
        """Runs a forward pass under a gradient tape."""
        call = _tensors(call)
        entered = [call.values[place] for place in entering]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for watched in (*entered, *self._variables):
                tape.watch(getattr(watched, "value", watched))
            found = self._compute(call)
        return found, _Kept(tape, entered)

    def back(self, kept: _Kept, roots: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
        """Runs backward, once for each tape."""
        sources = [*kept.entered, *(variable.value for variable in self._variables)]
        if not roots:
            return [None] * len(kept.entered), [None] * len(self._variables)
        found = kept.tape.gradient(
            [root for root, _ in roots],
            sources,
            output_gradients=[tf.convert_to_tensor(given, root.dtype) for root, given in roots],
        )
        dense = [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in found]
        return dense[: len(kept.entered)], dense[len(kept.entered) :]

    def seeded(self, seed: int | None) -> AbstractContextManager[None]:
        """Does nothing, because layers draw from Keras's generators."""
        return nullcontext()

    def stepping(self) -> AbstractContextManager[None]:
        """Does nothing, because tapes keep the values they read."""
        return nullcontext()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a ``tf.function`` that is traced for each kind of arguments."""
        found: Callable[..., Any] = tf.function(function, reduce_retracing=True)
        return found


def make(computation: Computation, variables: Sequence[Any]) -> TensorFlowAutodiff:
    """Returns the `TensorFlowAutodiff` of a stage."""
    return TensorFlowAutodiff(computation, variables)


def _tensors(call: Call) -> Call:
    """Converts arrays to tensors: a graph is traced once for each kind of tensor, but again for every array."""
    targets = None if call.targets is None else tf.nest.map_structure(tf.convert_to_tensor, call.targets)
    return call._replace(values=[tf.convert_to_tensor(value) for value in call.values], targets=targets)
