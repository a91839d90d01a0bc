"""The layers of a Keras model as a graph of calls and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from coordd.errors import ArgumentError
from coordd.pipeline.graph import Layer

__all__ = ["Graph", "arrays_of", "is_seed", "place_of", "states_of", "variables_of"]


_METHODS = (
    "call",
    "compute_loss",
    "compute_mask",
    "compute_metrics",
    "get_metrics_result",
    "make_predict_function",
    "make_test_function",
    "make_train_function",
    "metrics",
    "predict_step",
    "test_step",
    "train_step",
)
"""What ``fit``, ``evaluate`` and ``predict`` of Keras call of a model, and a pipeline does not."""


@dataclass(frozen=True)
class _Call:
    """One call of a layer or of an operation such as an addition.

    Attributes:
        operation: the layer or operation.
        node: Keras's record of the call, which has its other arguments.
        reads: numbers of the input tensors.
        writes: numbers of the output tensors.
    """

    operation: Any
    node: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Graph:
    """A functional or Sequential model as calls in the order of ``model.summary()``.

    Attributes:
        model: the model.
        calls: of its layers, without the input layers.
        tensors: Keras's symbolic tensors; a tensor's number is its index here.
        inputs: numbers of the model's inputs.
        outputs: numbers of the model's outputs.
    """

    def __init__(self, model: keras.Model) -> None:
        """Reads the graph of a built model.

        Raises:
            ArgumentError: the model has no graph, because its own code calls the layers; it overrides what Keras would
                call to train it; or it has no layers.
        """
        if not (isinstance(model, keras.Model) and getattr(model, "inputs", None)):
            raise ArgumentError(
                f"a {type(model).__name__} cannot be split, for only its own code knows in which order its layers are "
                "called: make a keras.Sequential of them, or a functional model, keras.Model(inputs, outputs)"
            )
        if own := [name for name in _METHODS if _overrides(model, name)]:
            raise ArgumentError(
                f"a pipeline runs the layers of a model and none of its methods, and {type(model).__name__} has "
                f"{', '.join(own)} of its own: give keras.Model(model.inputs, model.outputs) if the layers alone are "
                "meant, with loss= and metrics="
            )
        self.model = model
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.inputs = self._known(model.inputs)
        self.calls: list[_Call] = []
        by_depth = keras.Function(model.inputs, model.outputs)._nodes_by_depth  # noqa: SLF001 - Keras has no public way
        for depth in sorted(by_depth, reverse=True):
            for node in by_depth[depth]:
                if not node.is_input:
                    reads, writes = self._known(node.input_tensors), self._known(node.outputs)
                    self.calls.append(_Call(node.operation, node, reads, writes))
        self.outputs = self._known(model.outputs)
        if not self.calls:
            raise ArgumentError("this model has no layers that could be dealt out: add some")
        self._weights = {id(variable): str(place) for place, variable in enumerate(model.variables)}

    @property
    def table(self) -> tuple[Layer, ...]:
        """The layers as the partitioner sees them."""
        found: list[Layer] = []
        writers = {number: place for place, call in enumerate(self.calls) for number in call.writes}
        for call in self.calls:
            reads = sorted({writers[number] for number in call.reads if number in writers})
            own = variables_of(call.operation)
            keys = tuple(dict.fromkeys(self.key(variable) for variable in own if variable.trainable))
            found.append(Layer(call.operation.name, tuple(reads), call.operation.name if own else "", keys))
        return tuple(found)

    def key(self, variable: Any) -> str:
        """Returns a variable's index in the model, the same on all ranks and backends, whatever its name."""
        return self._weights[id(variable)]

    def _known(self, tensors: Sequence[Any]) -> tuple[int, ...]:
        for tensor in tensors:
            if id(tensor) not in self._numbers:
                self._numbers[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
        return tuple(self._numbers[id(tensor)] for tensor in tensors)


def _overrides(model: keras.Model, name: str) -> bool:
    """Returns whether a method or property of a model is not Keras's own."""
    owner = next((each for each in type(model).__mro__ if name in vars(each)), keras.Model)
    return name in vars(model) or owner.__module__.partition(".")[0] != "keras"


def variables_of(operation: Any) -> list[Any]:
    """Returns all variables of a layer; an operation has none."""
    return list(operation.variables) if isinstance(operation, keras.Layer) else []


def states_of(operation: Any) -> list[Any]:
    """Returns the variables that layers update themselves, such as moving statistics; not frozen weights."""
    if not isinstance(operation, keras.Layer):
        return []
    layers = operation._flatten_layers()  # noqa: SLF001 - the public attribute also lists frozen weights
    return [variable for layer in layers for variable in layer._non_trainable_variables]  # noqa: SLF001 - as above


def is_seed(variable: Any) -> bool:
    """Returns whether a variable is the state of a Keras random number generator."""
    return bool(variable.name == "seed_generator_state")


def place_of(key: str) -> int:
    """Returns a variable's index in the model, from its key."""
    return int(key)


def arrays_of(variables: Iterable[Any]) -> list[np.ndarray]:
    """Returns copies of the variables' values."""
    return [np.array(keras.ops.convert_to_numpy(variable), order="C") for variable in variables]
