"""Which calls of a Keras model make which stage, and what follows from that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import keras

from coordd.dtypes import dtype_of
from coordd.errors import ArgumentError
from coordd.pipeline import graph
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.load import Load
from coordd.pipeline.partition import split_counts
from coordd.pipeline.profile import Profile
from coordd_keras.pipeline.graph import Graph, variables_of

__all__ = ["Layout", "unmeasured"]


class Layout:
    """The stages of a model.

    Attributes:
        graph: the model's layers.
        spans: for each stage its layers.
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
            stages: how many there are to be.
            config: how.
            profile: of the layers, where they were measured.

        Raises:
            ArgumentError: it cannot be split like this; the text says why, and what can be done.
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
                "give as many numbers"
            )
        return cls(model, spans)

    @property
    def last(self) -> int:
        """The stage that has the output."""
        return len(self.spans) - 1

    def inputs(self, stage: int) -> tuple[int, ...]:
        """The model's inputs that a stage takes from the batch."""
        return tuple(number for number in self._reads(stage) if number not in self._giver)

    def given(self, giver: int, taker: int) -> tuple[int, ...]:
        """The tensors that go from one stage to a later one."""
        return tuple(number for number in self._reads(taker) if self._giver.get(number) == giver)

    def writes(self, stage: int) -> tuple[int, ...]:
        """The tensors of a stage that later ones take, each once."""
        found = (number for taker in range(stage + 1, len(self.spans)) for number in self.given(stage, taker))
        return tuple(dict.fromkeys(found))

    @cached_property
    def flows(self) -> tuple[tuple[int, int], ...]:
        """Which stage's results which later stage takes."""
        count = len(self.spans)
        pairs = ((giver, taker) for giver in range(count) for taker in range(giver + 1, count))
        return tuple(pair for pair in pairs if self.given(*pair))

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that have each variable."""
        found: dict[str, list[int]] = {}
        for stage in range(len(self.spans)):
            for key in self.variables(stage):
                found.setdefault(key, []).append(stage)
        return {key: tuple(stages) for key, stages in found.items()}

    @cached_property
    def tied(self) -> frozenset[int]:
        """The stages that have variables which others have, too."""
        shared = (stages for stages in self.holders.values() if len(stages) > 1)
        return frozenset(stage for stages in shared for stage in stages)

    def variables(self, stage: int) -> dict[str, Any]:
        """The variables of a stage, by names that are alike on all ranks."""
        own = (variable for call in self._calls(stage) for variable in variables_of(call.operation))
        return {self.graph.key(variable): variable for variable in own}

    def part(self, stage: int) -> tuple[keras.Model, tuple[int, ...], tuple[int, ...]]:
        """The layers of a stage as a model, with the tensors that it takes and gives, in order.

        The last one gives what the whole model gives, in its structure and under its names.
        """
        reads, tensors = self._reads(stage), self.graph.tensors
        if stage < self.last:
            writes = self.writes(stage)
            return self._model(reads, [tensors[number] for number in writes]), reads, writes
        whole = self.graph.model
        structure = whole.outputs[0] if isinstance(whole, keras.Sequential) else whole.output
        own = {id(tensors[number]): number for number in self.graph.outputs}

        def made(tensor: Any) -> Any:
            if self._giver.get(own[id(tensor)]) == stage:
                return tensor
            return keras.layers.Identity(name=tensor._keras_history.operation.name)(tensor)  # noqa: SLF001 - as above

        return self._model(reads, keras.tree.map_structure(made, structure)), reads, self.graph.outputs

    def _model(self, reads: Sequence[int], outputs: Any) -> keras.Model:
        return keras.Model([self.graph.tensors[number] for number in reads], outputs)

    def _calls(self, stage: int) -> Iterator[Any]:
        return (self.graph.calls[place] for place in self.spans[stage])

    def _reads(self, stage: int) -> tuple[int, ...]:
        """The tensors that a stage takes: the model's inputs, and what other stages give."""
        found = dict.fromkeys(number for call in self._calls(stage) for number in call.reads)
        if stage == self.last:
            found |= dict.fromkeys(self.graph.outputs)
        return tuple(number for number in found if self._giver.get(number) != stage)


def unmeasured(model: Graph, config: PipelineConfig) -> Profile:
    """What is known of the layers without running them."""
    layers = model.table
    loads = tuple(Load(parameters=_nbytes(call.operation)) for call in model.calls)
    return Profile(tuple(layer.name for layer in layers), loads, tuple(graph.condense(layers, config.reuse)))


def _nbytes(operation: Any) -> int:
    own = {id(variable): variable for variable in variables_of(operation) if variable.trainable}
    return sum(math.prod(variable.shape) * dtype_of(variable.dtype).itemsize for variable in own.values())
