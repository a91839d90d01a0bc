"""The plans of a pipeline: each is made when it is first needed."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from coordd.pipeline.action import Kind
from coordd.pipeline.lowering import lower
from coordd.pipeline.plan import Plan
from coordd_torch.pipeline.config import PipelineConfig
from coordd_torch.pipeline.layout import Layout

__all__ = ["Plans"]


class Plans:
    """What the ranks of a pipeline do, for each number of microbatches.

    Attributes:
        ranks: of a replica of the pipeline; with replicas for each stage, the number of stages.
        sketch: what is computed in a step with as many microbatches as the user wishes.
    """

    def __init__(self, config: PipelineConfig, world: int) -> None:
        """Plans a step.

        Raises:
            ArgumentError: there cannot be such a pipeline in a world of this size.
        """
        self._config = config
        self.ranks = config.ranks(world)
        self.sketch = self._plan(config.microbatches)
        self.lowered = lru_cache(maxsize=None)(self._lowered)

    def _plan(self, microbatches: int) -> Plan:
        config = self._config
        return config.choice.plan(self.ranks, microbatches, chunks=config.chunks, replicas=config.data_parallel)

    def _lowered(self, microbatches: int, layout: Layout, *, training: bool, step: bool = True) -> Plan:
        """What the ranks do, with all that moves.

        Args:
            microbatches: for each replica of the widest stage.
            layout: the stages.
            training: whether microbatches go back.
            step: whether weights change, or gradients are left where they are.
        """
        plan = self._plan(microbatches)
        if not training:
            forward = [tuple(action for action in mine if action.kind is Kind.FORWARD) for mine in plan.actions]
            plan = replace(plan, actions=tuple(forward), versions=())
        tied = {stage for stages in layout.tied.values() for stage in stages}
        plan = lower(plan, layout.flows, tied=tied)
        if not step:
            still = [tuple(action for action in mine if action.kind is not Kind.STEP) for mine in plan.actions]
            plan = replace(plan, actions=tuple(still), versions=())
        return plan
