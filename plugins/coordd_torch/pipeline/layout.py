"""Assignment of a captured model's layers to stages, and the resulting dataflow and parameter sharing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from torch import nn

from coordd.errors import ArgumentError
from coordd.pipeline import graph
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.load import Load, Memory
from coordd.pipeline.partition import split_counts
from coordd.pipeline.profile import Profile
from coordd_torch.pipeline.capture import Captured
from coordd_torch.pipeline.cut import Cut
from coordd_torch.pipeline.stage_module import StageModule
from coordd_torch.pipeline.trace import Trace
from coordd_torch.pipeline.trace_cache import KEPT
from coordd_torch.pipeline.tying import copied

__all__ = ["Layout"]


class Layout:
    """The stages of a model.

    Attributes:
        captured: the model's layers.
        spans: for each stage its layers.
    """

    def __init__(self, captured: Captured, spans: Sequence[range]) -> None:
        self.captured = captured
        self.spans = tuple(spans)
        self._flows = lru_cache(maxsize=KEPT)(self._uncached_flows)
        self._cut = lru_cache(maxsize=KEPT * len(self.spans))(self._uncached_cut)

    @classmethod
    def of(
        cls,
        captured: Captured,
        stages: int,
        config: PipelineConfig,
        *,
        profile: Profile | None = None,
        memory: Memory | None = None,
    ) -> Layout:
        """Splits a model.

        Args:
            captured: the model.
            stages: number of stages.
            config: how the model is split.
            profile: of its layers, if the split depends on their cost.
            memory: memory model and limit of a stage.

        Raises:
            ArgumentError: the model cannot be split like this; the message gives the reason and a remedy.
        """
        try:
            return cls(captured, cls._spans(captured, stages, config, profile=profile, memory=memory))
        except ArgumentError as error:
            if captured.traces.closed is None:
                raise
            text = f"{error}. Only its direct children are layers: {captured.traces.closed}"
            raise ArgumentError(text) from error

    @staticmethod
    def _spans(
        captured: Captured, stages: int, config: PipelineConfig, *, profile: Profile | None, memory: Memory | None
    ) -> Sequence[range]:
        layers = captured.table
        if config.layers_per_proc != "auto":
            spans = split_counts([layer.name for layer in layers], config.layers_per_proc)
            graph.check_cuts(layers, [span.start for span in spans[1:]], copied(layers, config.reuse))
            if profile is not None:
                profile.check(spans, memory)
            return spans
        return (profile or _unmeasured(captured, config)).split(stages, by=config.split, memory=memory)

    def flows(self, microbatches: Iterable[Mapping[str, Any]], *, training: bool) -> tuple[tuple[int, int], ...]:
        """Returns the pairs (sending stage, receiving stage) for any of these inputs.

        Raises:
            CaptureError: the model cannot be traced with them.
        """
        traces = dict.fromkeys(self.captured.traces.find(inputs, training=training) for inputs in microbatches)
        return tuple(sorted({flow for trace in traces for flow in self._flows(trace)}))

    def _uncached_flows(self, trace: Trace) -> frozenset[tuple[int, int]]:
        cuts = [self._cut(trace, stage) for stage in range(len(self.spans))]
        giver = {name: stage for stage, cut in enumerate(cuts) for name in cut.writes}
        return frozenset((giver[name], taker) for taker, cut in enumerate(cuts) for name in cut.reads)

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages have, with these stages."""
        return graph.tied(self.captured.table, self._stage_of_layer)

    @cached_property
    def shared(self) -> frozenset[int]:
        """The stages that share a parameter with another stage."""
        return frozenset(stage for stages in self.tied.values() for stage in stages)

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that have each parameter or buffer, under all its names."""
        found: dict[str, list[int]] = {}
        for stage, module in enumerate(self._outlines):
            for name in _names(module):
                found.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in found.items()}

    @cached_property
    def _outlines(self) -> list[StageModule]:
        return [self.module(stage, self.captured.model) for stage in range(len(self.spans))]

    @cached_property
    def _stage_of_layer(self) -> list[int]:
        return [stage for stage, span in enumerate(self.spans) for _ in span]

    def module(self, stage: int, model: nn.Module) -> StageModule:
        """Returns the layers of a stage, with their parameters from a model like the captured one."""
        span = self.spans[stage]
        return StageModule(model, self.captured.traces, span.start, span.stop - 1)

    def names(self, stages: Iterable[int]) -> set[str]:
        """Returns all names of the parameters and buffers of some stages; constants are not part of the model."""
        held, known = set(stages), _names(self.captured.model)
        return {name for name, holders in self.holders.items() if name in known and not held.isdisjoint(holders)}

    def route(
        self, stage: int, inputs: Mapping[str, Any], flows: Iterable[tuple[int, int]], *, training: bool
    ) -> dict[int, Sequence[str]]:
        """Returns the names of the values that a stage sends to each later stage of the flows, for these inputs."""
        trace = self.captured.traces.find(inputs, training=training)
        writes = self._cut(trace, stage).writes
        found: dict[int, Sequence[str]] = {}
        for giver, taker in flows:
            if giver == stage:
                reads = set(self._cut(trace, taker).reads)
                found[taker] = [name for name in writes if name in reads]
        return found

    def _uncached_cut(self, trace: Trace, stage: int) -> Cut:
        span = self.spans[stage]
        return Cut(trace, span.start, span.stop - 1)


def _names(module: nn.Module) -> set[str]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name for name, _ in named}


def _unmeasured(captured: Captured, config: PipelineConfig) -> Profile:
    """Returns a profile without measurements: sizes of parameters only."""
    sizes = {name: parameter.nbytes for name, parameter in captured.model.named_parameters()}
    loads = [Load(parameters=sum(sizes[key] for key in layer.parameters)) for layer in captured.table]
    names = tuple(layer.name for layer in captured.table)
    return Profile(names, tuple(loads), tuple(graph.condense(captured.table, copied(captured.table, config.reuse))))
