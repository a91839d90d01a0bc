"""Assigns the calls of a Keras model to stages, and derives what the stages exchange."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import keras

from coordd.errors import ArgumentError
from coordd.ops.dtypes import dtype_of
from coordd.pipeline import graph
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.load import Load
from coordd.pipeline.partition import split_counts
from coordd.pipeline.profile import Profile
from coordd_keras.pipeline.graph import Graph, states_of, variables_of

__all__ = ["Layout", "Part", "unmeasured"]


class Part(NamedTuple):
    """A stage's layers as a model, with the numbers of its input and output tensors, in order."""

    model: keras.Model
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Layout:
    """The stages of a model.

    Attributes:
        graph: the model's layers.
        spans: for each stage the indices of its layers.
    """

    def __init__(self, model: Graph, spans: Sequence[range]) -> None:
        self.graph = model
        self.spans = tuple(spans)
        self._stage = {call: stage for stage, span in enumerate(self.spans) for call in span}
        self._giver = {number: self._stage[place] for place, call in enumerate(model.calls) for number in call.writes}

    @classmethod
    def of(cls, model: Graph, stages: int, config: PipelineConfig, profile: Profile | None = None) -> Layout:
        """Splits a model.

        Args:
            model: its layers.
            stages: number of stages.
            config: how to split.
            profile: of the layers, if they were measured.

        Raises:
            ArgumentError: the model cannot be split like this; the text says why, and what can be done.
        """
        layers = model.table
        if config.layers_per_proc != "auto":
            spans = split_counts([layer.name for layer in layers], config.layers_per_proc)
            graph.check_cuts(layers, [span.start for span in spans[1:]], config.reuse)
        else:
            spans = (profile or unmeasured(model, config)).split(stages, by=config.split)
        if len(spans) != stages:
            raise ArgumentError(
                f"layers_per_proc has {len(spans)} stages, and these ranks have {stages} under {config.schedule!r}: "
                "give as many numbers, or 'auto'"
            )
        return cls(model, spans)

    @property
    def last(self) -> int:
        """The last stage, which has the output."""
        return len(self.spans) - 1

    def inputs(self, stage: int) -> tuple[int, ...]:
        """Returns the model's inputs that a stage reads from the batch."""
        return tuple(number for number in self._reads(stage) if number not in self._giver)

    def given(self, giver: int, taker: int) -> tuple[int, ...]:
        """Returns the tensors that one stage sends to a later one."""
        return tuple(number for number in self._reads(taker) if self._giver.get(number) == giver)

    def writes(self, stage: int) -> tuple[int, ...]:
        """Returns the tensors of a stage that later stages read, each once."""
        found = (number for taker in range(stage + 1, len(self.spans)) for number in self.given(stage, taker))
        return tuple(dict.fromkeys(found))

    @cached_property
    def flows(self) -> tuple[tuple[int, int], ...]:
        """Pairs (sending stage, later receiving stage)."""
        count = len(self.spans)
        pairs = ((giver, taker) for giver in range(count) for taker in range(giver + 1, count))
        return tuple(pair for pair in pairs if self.given(*pair))

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """For each variable the stages that have it."""
        found: dict[str, list[int]] = {}
        for stage in range(len(self.spans)):
            for key in self.variables(stage):
                found.setdefault(key, []).append(stage)
        return {key: tuple(stages) for key, stages in found.items()}

    @cached_property
    def tied(self) -> frozenset[int]:
        """The stages that share a variable with another stage."""
        shared = (stages for stages in self.holders.values() if len(stages) > 1)
        return frozenset(stage for stages in shared for stage in stages)

    def variables(self, stage: int) -> dict[str, Any]:
        """Returns the variables of a stage by keys that are the same on all ranks."""
        own = (variable for call in self._calls(stage) for variable in variables_of(call.operation))
        return {self.graph.key(variable): variable for variable in own}

    def states(self, stage: int) -> dict[str, Any]:
        """Returns the variables of a stage that its layers update themselves."""
        own = (variable for call in self._calls(stage) for variable in states_of(call.operation))
        return {self.graph.key(variable): variable for variable in own}

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Each stage's layers as a separate model, which shares all variables with the whole model.

        Raises:
            ValueError: on all ranks, if Keras rejects one of the models.
        """
        return tuple(self._part(stage) for stage in range(len(self.spans)))

    def _part(self, stage: int) -> Part:
        """Calls a stage's layers again, on new inputs for the tensors that the stage reads."""
        reads, tensors = self._reads(stage), self.graph.tensors
        entering = {
            number: keras.Input(batch_shape=tensors[number].shape, dtype=tensors[number].dtype) for number in reads
        }
        found = {id(tensors[number]): tensor for number, tensor in entering.items()}
        for call in self._calls(stage):
            args, kwargs = call.node.arguments.fill_in(found)
            made = keras.tree.flatten(call.operation(*args, **kwargs))
            found |= {id(tensors[number]): tensor for number, tensor in zip(call.writes, made, strict=True)}
        if stage < self.last:
            writes = self.writes(stage)
            model = keras.Model(list(entering.values()), [found[id(tensors[number])] for number in writes])
            return Part(model, reads, writes)
        return Part(self._end(list(entering.values()), found), reads, self.graph.outputs)

    def _end(self, entering: Sequence[Any], found: Mapping[int, Any]) -> keras.Model:
        """Returns the last stage as a model with the output structure and names of the whole model."""
        whole = self.graph.model
        inputs = set(map(id, entering))

        def given(tensor: Any) -> Any:
            own = found[id(tensor)]
            return keras.layers.Identity()(own) if id(own) in inputs else own

        if isinstance(whole, keras.Sequential):
            return keras.Model(entering, given(whole.outputs[0]))
        model = keras.Model(entering, keras.tree.map_structure(given, whole.output))
        model.output_names = list(whole.output_names)
        return model

    def _calls(self, stage: int) -> Iterator[Any]:
        return (self.graph.calls[place] for place in self.spans[stage])

    def _reads(self, stage: int) -> tuple[int, ...]:
        """Returns the tensors that a stage reads: the model's inputs, and tensors of other stages."""
        found = dict.fromkeys(number for call in self._calls(stage) for number in call.reads)
        if stage == self.last:
            found |= dict.fromkeys(self.graph.outputs)
        return tuple(number for number in found if self._giver.get(number) != stage)


def unmeasured(model: Graph, config: PipelineConfig) -> Profile:
    """Returns a profile of the layers without running them: their parameter sizes in bytes."""
    layers = model.table
    loads = tuple(Load(parameters=_nbytes(call.operation)) for call in model.calls)
    return Profile(tuple(layer.name for layer in layers), loads, tuple(graph.condense(layers, config.reuse)))


def _nbytes(operation: Any) -> int:
    own = {id(variable): variable for variable in variables_of(operation) if variable.trainable}
    return sum(math.prod(variable.shape) * dtype_of(variable.dtype).itemsize for variable in own.values())
