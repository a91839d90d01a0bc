"""Plans of a pipeline, each created when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from coordd.pipeline.action import Action, Kind
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.lowering import lower
from coordd.pipeline.plan import Plan
from coordd.pipeline.schedules.registry import find

__all__ = ["Plans"]

Flows = tuple[tuple[int, int], ...]

_KEPT = 256


class Plans:
    """The plans of a pipeline, for each number of microbatches.

    Attributes:
        ranks: number of ranks of a replica of the pipeline; with replicas for each stage, the number of stages.
        sketch: the unlowered plan of a step with the configured number of microbatches.
        least: the fewest rows of a training batch.
    """

    def __init__(self, config: PipelineConfig, world: int) -> None:
        """Plans a step.

        Raises:
            ArgumentError: no such pipeline is possible in a world of this size.
        """
        self._config = config
        self.ranks = config.ranks(world)
        self.sketch = self._plan(config.microbatches)
        self.least = config.least_for(self.ranks if config.choice.fills else 1)
        self.lowered = lru_cache(maxsize=_KEPT)(self._lowered)

    def _plan(self, microbatches: int, *, training: bool = True) -> Plan:
        """Returns the unlowered plan; without training, 1F1B replaces a schedule that does not flush.

        1F1B accepts any number of microbatches, and without training no weights change.
        """
        config = self._config
        choice = config.choice if config.choice.flushes or training else find("1f1b")
        return choice.plan(self.ranks, microbatches, chunks=config.chunks, replicas=config.data_parallel)

    def _lowered(
        self, microbatches: int, flows: Flows, tied: frozenset[int], *, training: bool, step: bool = True
    ) -> Plan:
        """Returns the lowered plan, with all sends, receives and reductions.

        Args:
            microbatches: for each replica of the widest stage.
            flows: pairs of stages: the second takes the results of the first.
            tied: stages that share parameters with others.
            training: whether there are backward passes.
            step: whether weights change; otherwise gradients are only accumulated.
        """
        plan = self._plan(microbatches, training=training)
        if not training:
            forward = [tuple(action for action in mine if action.kind is Kind.FORWARD) for mine in plan.actions]
            plan = replace(plan, actions=tuple(forward), versions=())
        plan = lower(plan, flows, tied=tied)
        return plan if step else _still(plan)


def _still(plan: Plan) -> Plan:
    """Removes the steps; gradients are then those of all microbatches, and reduced once, after the last one."""

    def kept(mine: tuple[Action, ...]) -> Iterator[Action]:
        last = {action.stage: place for place, action in enumerate(mine) if action.kind is Kind.REDUCE}
        for place, action in enumerate(mine):
            if action.kind is not Kind.STEP and (action.kind is not Kind.REDUCE or last[action.stage] == place):
                yield action

    return replace(plan, actions=tuple(tuple(kept(mine)) for mine in plan.actions), versions=())
