"""The layers of a Keras model, and which tensors go from one to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from coordd.errors import ArgumentError
from coordd.pipeline.graph import Layer

__all__ = ["Graph", "arrays_of", "is_seed", "place_of", "states_of", "variables_of"]


@dataclass(frozen=True)
class _Call:
    """One call of a layer, or of an operation such as an addition.

    Attributes:
        operation: what is called.
        node: Keras's own note of the call, which knows its other arguments.
        reads: the tensors that it takes, as numbers.
        writes: those that it gives.
    """

    operation: Any
    node: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Graph:
    """A functional model, or a Sequential one, as calls in the order of ``model.summary()``.

    Attributes:
        model: the model.
        calls: of its layers, its inputs excepted.
        tensors: Keras's symbolic tensors; all else knows them by their places here.
        inputs: those that the model takes.
        outputs: those that it gives.
    """

    def __init__(self, model: keras.Model) -> None:
        """Reads a model that has been built.

        Raises:
            ArgumentError: it has no graph, as its layers are called by code of its own, or no layers.
        """
        if not (isinstance(model, keras.Model) and getattr(model, "inputs", None)):
            raise ArgumentError(
                f"a {type(model).__name__} cannot be split, for only its own code knows in which order its layers are "
                "called: make a keras.Sequential of them, or a functional model, keras.Model(inputs, outputs)"
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
        """What the split knows of the layers."""
        found: list[Layer] = []
        writers = {number: place for place, call in enumerate(self.calls) for number in call.writes}
        for call in self.calls:
            reads = sorted({writers[number] for number in call.reads if number in writers})
            own = variables_of(call.operation)
            keys = tuple(dict.fromkeys(self.key(variable) for variable in own if variable.trainable))
            found.append(Layer(call.operation.name, tuple(reads), call.operation.name if own else "", keys))
        return tuple(found)

    def key(self, variable: Any) -> str:
        """Names a variable, alike on all ranks and backends."""
        return f"{self._weights[id(variable)]}.{variable.name}"

    def _known(self, tensors: Sequence[Any]) -> tuple[int, ...]:
        for tensor in tensors:
            if id(tensor) not in self._numbers:
                self._numbers[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
        return tuple(self._numbers[id(tensor)] for tensor in tensors)


def variables_of(operation: Any) -> list[Any]:
    """All variables of a layer; an operation has none."""
    return list(operation.variables) if isinstance(operation, keras.Layer) else []


def states_of(operation: Any) -> list[Any]:
    """The variables that layers change by themselves, such as moving statistics; frozen weights are none."""
    if not isinstance(operation, keras.Layer):
        return []
    layers = operation._flatten_layers()  # noqa: SLF001 - publicly, what is frozen cannot be told from them
    return [variable for layer in layers for variable in layer._non_trainable_variables]  # noqa: SLF001 - as above


def is_seed(variable: Any) -> bool:
    """Says whether a variable is the state of one of Keras's generators of random numbers."""
    return bool(variable.name == "seed_generator_state")


def place_of(key: str) -> int:
    """The place of a variable in the model, from its name."""
    return int(key.partition(".")[0])


def arrays_of(variables: Iterable[Any]) -> list[np.ndarray]:
    """Copies the values of variables."""
    return [np.array(keras.ops.convert_to_numpy(variable), order="C") for variable in variables]
