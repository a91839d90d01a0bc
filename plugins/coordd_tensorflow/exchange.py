"""Reduces the gradients of a tape or optimizer: starts buckets as they become ready, and waits for all at the end.

In a graph, the start of a bucket is a separate operation that depends only on the gradients of that bucket. So it runs
as soon as they are computed, while backward continues; the operation that waits for all buckets runs when all have
started.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from coordd import api
from coordd.daemon.operations import Operations, Prefix
from coordd.errors import ArgumentError, brief
from coordd.gradients.bucketing import Grouping
from coordd.gradients.consistency import Reading, Settings
from coordd.gradients.reducer import Gradients, Parameter
from coordd.gradients.settings import Choices
from coordd.ops.dtypes import dtype_of
from coordd.ops.process_sets import ProcessSet
from coordd_tensorflow.differentiable import derived
from coordd_tensorflow.graph import call, place_in_graph
from coordd_tensorflow.operations import allreduce, grouped_allreduce
from coordd_tensorflow.slices import checked_finite
from coordd_tensorflow.unfinished import UNFINISHED
from coordd_tensorflow.values import READING, UNREADABLE

__all__ = ["Exchange", "name_of", "plain", "scaled", "variable_of"]

_ANY = Grouping(kind=())

Gradient = Any
"""A `tf.Tensor`, `tf.IndexedSlices` or None."""


def name_of(variable: Any, index: int) -> str:
    """Returns a variable's name: Keras's path, which is unique in a model, TensorFlow's name, or its index."""
    try:
        found: str = getattr(variable, "path", None) or variable.name
    except AttributeError:  # an eager tensor has none
        return f"source.{index}"
    return found


def variable_of(source: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable; returns other objects unchanged."""
    value = getattr(source, "value", None)
    return value if isinstance(value, tf.Variable) else source


def plain(groups: Any) -> Any:
    """Replaces Keras variables with their TensorFlow variables, in lists of lists."""
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        return groups
    return [[variable_of(variable) for variable in group] for group in groups]


def scaled(gradient: Gradient, divisor: int) -> Gradient:
    """Divides a gradient, which may be sparse or None."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return gradient if gradient is None else gradient / divisor


class Exchange:
    """Reduces the gradients of one tape or optimizer."""

    def __init__(self, choices: Choices, prefix: str | None = None) -> None:
        """Keeps the settings.

        Args:
            choices: the user's settings.
            prefix: of operation names; equal on all ranks and unique to this optimizer. By default the first tape for a
                set of variables gets a new prefix, and later tapes for the same variables share it.
        """
        self._choices = choices
        self._prefix = None if prefix is None else Prefix(prefix, api.source()().session)

    def reduce(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], settings: Settings | None = None
    ) -> list[Gradient]:
        """Reduces gradients over the ranks.

        Args:
            gradients: dense, sparse or None, one for each variable; the same kinds on all ranks.
            variables: the gradients' variables.
            settings: the hyperparameters of the optimizer that will use the gradients.

        Returns:
            the reduced gradients; None where no rank has one.

        Raises:
            ArgumentError: a shape is unknown, or a type cannot be reduced.
            MismatchError: the ranks have different variables, or only some ranks have a gradient for a variable, which
                cannot be corrected in a graph.
        """
        source = api.source()
        if source().daemon.world.size == 1:
            return list(gradients)
        sparse: list[int] = []
        dense: list[int] = []
        for index, gradient in enumerate(gradients):
            is_sparse = isinstance(gradient, tf.IndexedSlices) and not self._choices.sparse_as_dense
            (sparse if is_sparse else dense).append(index)
        way = _Dense(
            self._choices,
            self._prefix,
            [gradients[i] for i in dense],
            [variables[i] for i in dense],
            [variables[i] for i in sparse],
        )
        if not self._choices.exchanges(source().daemon.world):
            return list(gradients)
        found: list[Gradient] = list(gradients)
        # Dense gradients first: their reduction compares which variables have dense gradients, and reports mismatches.
        for index, gradient in zip(dense, way.reduce(settings), strict=True):
            found[index] = gradient
        if settings is None:  # an optimizer uses its gradients itself, outside any tape
            self._derive(gradients, found, dense)
        wanted = source().daemon.config.nonfinite
        prefix = "" if self._prefix is None else self._prefix.text  # tapes in several threads take theirs in any order
        for index in sparse:
            name = name_of(variables[index], index)
            slices = allreduce(
                gradients[index],
                op=self._choices.op,
                name=f"{prefix}sparse.{name}{variables[index].shape}",
                process_set=self._choices.process_set,
            )
            if settings is None:
                slices = _derived_slices(slices, self._choices.process_set)
            found[index] = slices if wanted == "ignore" else checked_finite(slices, name, wanted)
        return found

    def _derive(self, own: Sequence[Gradient], found: list[Gradient], dense: Sequence[int]) -> None:
        """Lets an outer tape differentiate through the reduction of dense gradients."""
        kinds = {index: found[index].dtype for index in dense if found[index] is not None}
        places = [index for index, kind in kinds.items() if kind.is_floating or kind.is_complex]
        if not places:
            return
        values = [tf.convert_to_tensor(own[index]) for index in places]
        for index, value in zip(places, derived(values, [found[at] for at in places], self._again), strict=True):
            found[index] = value

    def _again(self, upstream: list[tf.Tensor]) -> list[tf.Tensor]:
        reduced: list[tf.Tensor] = grouped_allreduce(
            upstream, op=self._choices.op, process_set=self._choices.process_set
        )
        return reduced


def _derived_slices(slices: tf.IndexedSlices, process_set: ProcessSet) -> tf.IndexedSlices:
    """Lets an outer tape differentiate through the reduction of slices as through that of a dense gradient.

    The slices come from an allgather, and its gradient is the mean over the ranks. Dense gradients have the sum there
    for `Sum`, and the mean for `Average`, of which the slices are already divided by the number of ranks. So both
    need a factor of that number.
    """
    members = process_set.count(api.size())

    @tf.custom_gradient
    def run(values: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tf.identity(values), lambda upstream: upstream * tf.cast(members, upstream.dtype)

    return tf.IndexedSlices(run(slices.values), slices.indices, slices.dense_shape)


_of_tapes: dict[Hashable, Prefix] = {}
"""The prefixes of tapes by the key of their parameters, over all sessions of this process."""


class _Way:
    """The buckets as used by functions inside a graph, without the tensors, which would stay alive forever."""

    def __init__(
        self,
        key: Hashable,
        prefix: Prefix | None,
        parameters: Sequence[Parameter],
        choices: Choices,
        reading: Reading,
    ) -> None:
        self._key = key
        self._parameters = tuple(parameters)
        self._reading = reading
        self._choices = choices
        self._source = api.source()
        self._lock = threading.Lock()
        # Chosen here, so that prefixes follow program order on all ranks, inside or outside the process set.
        self._made = _prefix(self._source(), key, prefix)

    @property
    def gradients(self) -> Gradients:
        """The buckets of the current daemon; created on first use."""
        memo = self._source().memo
        with self._lock:
            found: Gradients | None = memo.get(self._key)
            if found is None:
                prefix = memo.setdefault((self._key, "prefix"), self._made).within(self._source())
                found = Gradients(self._source(), self._parameters, self._choices, prefix=prefix, reading=self._reading)
                memo[self._key] = found
        found.serve(self._parameters, self._reading)
        return found

    def starter(self, given: Sequence[int]) -> Any:
        """Returns the function that puts the gradients of a bucket, given this step's number and the gradients."""
        # An asynchronous step outlives the call that started it, and the call of a session is not recognized.
        watched = not tf.executing_eagerly() and tf.config.experimental.get_synchronous_execution()
        watched = watched and tf.compat.v1.executing_eagerly_outside_functions()

        def start(step: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            gradients = self.gradients
            try:
                with gradients.begun(float(step)):
                    if watched:
                        UNFINISHED.begin(gradients, float(step))
                    for index, array in zip(given, arrays, strict=True):
                        gradients.put(index, array)
            except Exception as error:
                gradients.drop(f"could not give its gradients away: {brief(error)}")
                raise
            return [np.array(0, np.int32)]

        return start

    def waiter(
        self, packed: Sequence[int], large: Sequence[int], absent: Sequence[int], settings: Settings | None, count: int
    ) -> Any:
        """Returns the function that waits for the reduced gradients: small ones packed by bucket, then large ones.

        Its inputs are the results of the `count` start operations, then the hyperparameter that changes, if there is
        one.
        """

        def wait(*given: np.ndarray) -> list[np.ndarray]:
            gradients = self.gradients
            UNFINISHED.end(gradients)
            found = gradients.wait(absent)
            if settings is not None:
                gradients.note(lambda: settings.read(given[count] if given[count:] else None))
            arrays = [*map(found.packed, packed), *map(found.__getitem__, large)]
            return [array for array in arrays if array is not None]

        return wait


def _prefix(operations: Operations, key: Hashable, prefix: Prefix | None) -> Prefix:
    """Returns the prefix for a key: a new one, or the optimizer's, with a number from its second key on.

    A key of tapes of an earlier session keeps its prefix, because one rank alone may trace their function again.
    """
    memo = operations.memo
    found: Prefix | None = memo.get((key, "prefix"))
    if found is None:
        if prefix is not None:
            number = memo[prefix, "ways"] = memo.get((prefix, "ways"), -1) + 1
            found = Prefix(prefix.text + (f"{number}." if number else ""), prefix.session)
        elif (found := _of_tapes.get(key)) is None:
            text = operations.namespace(anew=False)  # one rank alone may know the key from before a deadlock
            found = _of_tapes[key] = Prefix(text, operations.session)
        memo[key, "prefix"] = found
    return found


class _Dense:
    """The dense gradients of one step in eager mode, or of one occurrence in a graph."""

    def __init__(
        self,
        choices: Choices,
        prefix: Prefix | None,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        sparse: Sequence[Any],
    ) -> None:
        self._choices = choices
        like = [
            tf.zeros([], variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        small = [choices.compression.compress(tensor) for tensor in like]
        self._contexts = [context for _, context in small]
        self._tensors = [None if given is None else tensor for (tensor, _), given in zip(small, gradients, strict=True)]
        names = [name_of(variable, index) for index, variable in enumerate(variables)]
        self._parameters = [
            Parameter(name, _known(name, variable.shape), dtype_of(tensor.dtype.name), variable_of(variable))
            for name, variable, (tensor, _) in zip(names, variables, small, strict=True)
        ]
        # Not the grouping itself: it identifies variables by address, and an address may be reused later on some ranks.
        grouped = choices.grouping.choice(map(variable_of, variables))
        others = [
            Parameter(
                name_of(variable, index),
                variable.shape,
                dtype_of(tf.as_dtype(variable.dtype).name),
                variable_of(variable),
            )
            for index, variable in enumerate(sparse)
            if tf.TensorShape(variable.shape).is_fully_defined()
        ]
        key = (
            replace(choices, grouping=_ANY),
            grouped,
            prefix,
            *map(str, self._parameters),
            "sparse",
            *map(str, others),
        )
        place = place_in_graph(key)
        # A later occurrence in a graph may run while the step of an earlier one still changes the variables.
        reading = (UNREADABLE if place else READING)._replace(others=tuple(others))
        self._way = _Way((*key, place), prefix, self._parameters, choices, reading)

    def reduce(self, settings: Settings | None) -> list[Gradient]:
        """Starts the buckets and waits for all, for an optimizer with these settings."""
        if not self._parameters:
            return []
        gradients = self._way.gradients
        step = tf.timestamp()  # the time when the graph runs, not when it is traced
        started = [
            call(self._way.starter(given), [step, *(self._tensors[at] for at in given)], [tf.int32], waits=False)[0]
            for bucket in gradients.buckets
            if (given := [index for index in bucket if self._tensors[index] is not None])
        ]
        packed = [bucket for bucket, small in enumerate(gradients.packed) if small]
        alone = {*range(len(self._parameters))}.difference(*gradients.packed)
        large = sorted(index for index in alone if self._tensors[index] is not None)
        absent = [index for index, tensor in enumerate(self._tensors) if tensor is None]
        firsts = [gradients.packed[bucket][0] for bucket in packed]
        dtypes = [tf.as_dtype(self._parameters[index].dtype.name) for index in (*firsts, *large)]
        # Read here, because in a graph this is before the step changes it.
        current = None if settings is None else settings.current()
        waiter = self._way.waiter(packed, large, absent, settings, len(started))
        arrived = call(waiter, started if current is None else [*started, current], dtypes)
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
        """Converts a reduced tensor to a gradient, if this rank has one for the variable."""
        if self._tensors[index] is None:
            return None
        shaped = tf.reshape(tensor, self._parameters[index].shape)
        return self._choices.compression.decompress(shaped, self._contexts[index])


def _known(name: str, shape: Any) -> tuple[int, ...]:
    found = tuple(shape)
    if None in found:
        text = f"the shape of {name!r} is {found}: gradients of a shape that is known only later cannot share a bucket"
        raise ArgumentError(text)
    return found
