"""Stages of Keras on TensorFlow: graphs, with a tape for each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from coordd.pipeline.storage import laid
from coordd.transport.loans import blank
from coordd_keras.pipeline.autodiff import Call, Computation, Result
from coordd_tensorflow.tensors import check_dense, to_tensor, view

__all__ = ["TensorFlowAutodiff", "TensorFlowCodec", "make"]


@dataclass(frozen=True)
class TensorFlowCodec:
    """The `coordd.pipeline.frame.Codec` of TensorFlow.

    Attributes:
        blank: allocates memory for frames.
    """

    blank: Callable[[int], np.ndarray] = field(default=blank)

    def is_tensor(self, value: object) -> bool:
        """Says whether a value is a tensor."""
        return isinstance(value, (tf.Tensor, tf.IndexedSlices))

    def differentiable(self, tensor: Any) -> bool:
        """Says whether gradients flow through a tensor."""
        return bool(tensor.dtype.is_floating)

    def array(self, tensor: Any) -> np.ndarray:
        """Views a tensor's values."""
        return view(check_dense(tensor))

    def tensor(self, array: np.ndarray, *, differentiable: bool) -> Any:
        """Makes a tensor of an array."""
        lying, axes = laid(array)
        found = to_tensor(lying)
        return found if axes == tuple(range(lying.ndim)) else tf.transpose(found, axes)


class _Weights:
    """The `coordd.pipeline.versions.Weights` of TensorFlow, which copies what is held before it changes it."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = variables

    def held(self) -> list[tf.Tensor]:
        """The values of each."""
        return [variable.value.read_value() for variable in self._variables]

    def put(self, values: Sequence[tf.Tensor]) -> None:
        """Assigns values."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def renew(self) -> None:
        """Needs nothing."""


@dataclass
class _Kept:
    tape: tf.GradientTape
    entered: list[tf.Tensor]


class TensorFlowAutodiff:
    """A graph for each kind of call, as ``tf.function`` makes them; see `coordd_keras.pipeline.autodiff.Autodiff`."""

    def __init__(self, computation: Computation, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self.codec = TensorFlowCodec()
        self.weights = _Weights(self._variables)
        self._computation = computation
        self._compute: Callable[[Call], Result] = self.compiled(computation)

    def prepare(self, call: Call) -> None:
        """Has Keras make what it needs, which no graph may."""
        self._computation.prepare(_tensors(call))

    def run(self, call: Call) -> Result:
        """Computes without a way back."""
        return self._compute(_tensors(call))

    def record(self, call: Call, entering: Sequence[int]) -> tuple[Result, _Kept]:
        """Computes under a tape."""
        call = _tensors(call)
        entered = [call.values[place] for place in entering]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for watched in (*entered, *self._variables):
                tape.watch(getattr(watched, "value", watched))
            found = self._compute(call)
        return found, _Kept(tape, entered)

    def back(self, kept: _Kept, roots: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
        """Goes back, once."""
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
        """Needs nothing: layers draw from generators of Keras's."""
        return nullcontext()

    def stepping(self) -> AbstractContextManager[None]:
        """Needs nothing: tapes have the values that were read."""
        return nullcontext()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a graph of it for each kind of arguments."""
        found: Callable[..., Any] = tf.function(function, reduce_retracing=True)
        return found


def make(computation: Computation, variables: Sequence[Any]) -> TensorFlowAutodiff:
    """Makes one."""
    return TensorFlowAutodiff(computation, variables)


def _tensors(call: Call) -> Call:
    """A graph is made for each kind of tensor, but for each array anew."""
    targets = None if call.targets is None else tf.nest.map_structure(tf.convert_to_tensor, call.targets)
    return call._replace(values=[tf.convert_to_tensor(value) for value in call.values], targets=targets)
