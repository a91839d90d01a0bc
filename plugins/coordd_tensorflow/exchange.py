"""The way of one tape's or optimizer's gradients: started as they become ready, awaited together at the end.

In a graph the start of a bucket is an operation of its own, which needs nothing but the gradients of that bucket. So it
runs as soon as they are computed, beside the rest of backward; the one that waits for all runs when all have started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordd import api
from coordd.differentiable import Source
from coordd.dtypes import dtype_of
from coordd.errors import ArgumentError, MismatchError
from coordd.gradients import Choices, Gradients, Parameter
from coordd.operations import Operations
from coordd_tensorflow.graph import call, place_in_graph
from coordd_tensorflow.operations import allreduce

__all__ = ["Exchange", "name_of", "scaled"]

Gradient = Any
"""A `tf.Tensor`, `tf.IndexedSlices` or None."""


def name_of(variable: Any, index: int) -> str:
    """The name of a variable: Keras's path, which is unique in a model, TensorFlow's name, or its place."""
    try:
        found: str = getattr(variable, "path", None) or variable.name
    except AttributeError:  # an eager tensor has none
        return f"source.{index}"
    return found


def scaled(gradient: Gradient, divisor: int) -> Gradient:
    """Divides a gradient, which may be sparse or None."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return gradient if gradient is None else gradient / divisor


class Exchange:
    """The way of the gradients of one tape or optimizer."""

    def __init__(self, choices: Choices, prefix: str | None = None) -> None:
        """Keeps what the user has chosen.

        Args:
            choices: that.
            prefix: of the names, equal on all ranks and of no other optimizer; by default the first tape of some
                variables gets one, and shares it with later ones of the same.
        """
        self._choices = choices
        self._prefix = prefix

    def reduce(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Reduces gradients over the ranks.

        Args:
            gradients: dense, sparse or None, one for each variable; the same kinds on all ranks.
            variables: which they are of.

        Returns:
            the reduced ones; None where no rank has one.

        Raises:
            ArgumentError: a shape is not known, or a type cannot be reduced.
            MismatchError: the ranks have different variables, or only some of them a gradient for one, which cannot be
                mended in a graph.
        """
        source = api.source()
        if source().daemon.world.size == 1:
            return list(gradients)
        sparse: list[int] = []
        dense: list[int] = []
        for index, gradient in enumerate(gradients):
            is_sparse = isinstance(gradient, tf.IndexedSlices) and not self._choices.sparse_as_dense
            (sparse if is_sparse else dense).append(index)
        way = _Dense(self._choices, self._prefix, source, [gradients[i] for i in dense], [variables[i] for i in dense])
        if not self._choices.exchanges(source().daemon.world):
            return list(gradients)
        found: list[Gradient] = list(gradients)
        for index in sparse:
            found[index] = allreduce(
                gradients[index],
                op=self._choices.op,
                name=f"sparse.{name_of(variables[index], index)}",
                process_set=self._choices.process_set,
            )
        for index, gradient in zip(dense, way.reduce(), strict=True):
            found[index] = gradient
        return found


class _Dense:
    """The dense gradients of one step, or of one place in a graph."""

    def __init__(
        self,
        choices: Choices,
        prefix: str | None,
        source: Source,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
    ) -> None:
        self._choices = choices
        self._prefix = prefix
        self._source = source
        self._names = [name_of(variable, index) for index, variable in enumerate(variables)]
        like = [
            tf.zeros([], variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        small = [choices.compression.compress(tensor) for tensor in like]
        self._contexts = [context for _, context in small]
        self._tensors = [None if given is None else tensor for (tensor, _), given in zip(small, gradients, strict=True)]
        self._parameters = [
            Parameter(name, _known(name, variable.shape), dtype_of(tensor.dtype.name), variable)
            for name, variable, (tensor, _) in zip(self._names, variables, small, strict=True)
        ]
        key = (choices, prefix, *map(str, self._parameters))
        self._key = (*key, place_in_graph(key))
        self._named(source())  # so that names follow the order of the program, on all ranks

    def reduce(self) -> list[Gradient]:
        """Starts and awaits them."""
        if not self._parameters:
            return []
        gradients = self._at_hand(self._source())
        started = [
            call(self._starter(given), [self._tensors[index] for index in given], [tf.int32], waits=False)[0]
            for bucket in gradients.buckets
            if (given := [index for index in bucket if self._tensors[index] is not None])
        ]
        packed = [bucket for bucket, small in enumerate(gradients.packed) if small]
        alone = {*range(len(self._parameters))}.difference(*gradients.packed)
        large = sorted(index for index in alone if self._tensors[index] is not None)
        firsts = [gradients.packed[bucket][0] for bucket in packed]
        dtypes = [self._parameters[index].dtype.name for index in (*firsts, *large)]
        arrived = call(self._waiter(packed, large), started, [tf.as_dtype(name) for name in dtypes])
        found: list[Gradient] = [None] * len(self._parameters)
        for bucket, flat in zip(packed, arrived, strict=False):
            small = gradients.packed[bucket]
            sizes = [self._parameters[index].size for index in small]
            flat.set_shape([sum(sizes)])
            for index, part in zip(small, tf.split(flat, sizes), strict=True):
                found[index] = self._landed(index, part)
        for index, tensor in zip(large, arrived[len(packed) :], strict=True):
            found[index] = self._landed(index, tensor)
        return found

    def _landed(self, index: int, tensor: tf.Tensor) -> Gradient:
        """Makes a gradient of what has arrived, where this rank has one."""
        if self._tensors[index] is None:
            return None
        shaped = tf.reshape(tensor, self._parameters[index].shape)
        return self._choices.compression.decompress(shaped, self._contexts[index])

    def _named(self, operations: Operations) -> str:
        """The prefix of the names; counted also by ranks that are not members."""
        if self._prefix is not None:
            return self._prefix
        if (found := operations.memo.get((self._key, "prefix"))) is None:
            found = operations.memo[self._key, "prefix"] = operations.namespace()
        return str(found)

    def _at_hand(self, operations: Operations) -> Gradients:
        """The buckets of this daemon; made when they are needed first."""
        found: Gradients | None = operations.memo.get(self._key)
        if found is None:
            prefix = self._named(operations)
            found = operations.memo[self._key] = Gradients(operations, self._parameters, self._choices, prefix=prefix)
        return found

    def _starter(self, given: Sequence[int]) -> Any:
        def start(*arrays: np.ndarray) -> list[np.ndarray]:
            gradients = self._at_hand(self._source())
            for index, array in zip(given, arrays, strict=True):
                gradients.put(index, array)
            return [np.array(0, np.int32)]

        return start

    def _waiter(self, packed: Sequence[int], large: Sequence[int]) -> Any:
        absent = [index for index, tensor in enumerate(self._tensors) if tensor is None]

        def wait(*_: np.ndarray) -> list[np.ndarray]:
            found = self._at_hand(self._source()).wait()
            if only := [self._names[index] for index in absent if found.has(index)]:
                raise MismatchError.told(only[0], "gradients", _elsewhere(only))
            arrays = [*map(found.packed, packed), *map(found.__getitem__, large)]
            return [array for array in arrays if array is not None]

        return wait


def _known(name: str, shape: Any) -> tuple[int, ...]:
    found = tuple(shape)
    if None in found:
        text = f"the shape of {name!r} is {found}: gradients of a shape that is known only later cannot share a bucket"
        raise ArgumentError(text)
    return found


def _elsewhere(names: Sequence[str]) -> str:
    return (
        f"other ranks have gradients for {', '.join(names)}, and this one has none: let all ranks compute the same "
        "function, or add what is missing as zero times the variable"
    )
