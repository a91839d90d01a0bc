"""A run of a pipeline, beside what the schedule makes of passes that take as long as they did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from coordd.errors import ArgumentError
from coordd.pipeline.export import save
from coordd.pipeline.measured import costs, measured
from coordd.pipeline.picture import draw
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Timeline, simulate
from coordd.pipeline.units import Units
from coordd_torch.state import allgather_object

if TYPE_CHECKING:
    from coordd_torch.pipeline.pipeline import Pipeline

__all__ = ["PipelineReview"]


class PipelineReview:
    """What was to come of a run, and what came of it.

    Attributes:
        plan: who did what in which order.
        predicted: the plan in virtual time: each pass takes what such passes took, and messages take none.
        measured: what really happened, on clocks that all ranks have started together.
    """

    def __init__(self, plan: Plan, predicted: Timeline, found: Timeline) -> None:
        self.plan = plan
        self.predicted = predicted
        self.measured = found

    @classmethod
    def of(cls, pipe: Pipeline) -> PipelineReview:
        """Collects what the ranks have recorded of their last run; all of them call it.

        Raises:
            ArgumentError: there was none yet.
        """
        if pipe.plan is None:
            raise ArgumentError("there is nothing to review yet: call train_batch first")
        spans = allgather_object(pipe.spans, name="pipeline.review")
        taken = replace(costs(pipe.plan, measured(pipe.plan, spans)), activation=[1.0] * pipe.plan.stages)
        return cls(pipe.plan, simulate(pipe.plan, taken), measured(pipe.plan, spans, taken))

    def __str__(self) -> str:
        return (
            f"{self.plan.name}: {1e3 * self.measured.makespan:.0f} ms and {self.measured.bubble:.1%} idle, "
            f"predicted {1e3 * self.predicted.makespan:.0f} ms and {self.predicted.bubble:.1%}"
        )

    def save(self, path: str | Path) -> None:
        """Draws both, on the same scale, as an SVG or a PNG.

        Raises:
            ArgumentError: the name says no such form, or what makes it is not installed.
            OSError: the file cannot be written.
        """
        units = Units(memory="activations")
        save(draw(self.plan, self.predicted, measured=self.measured, units=units), Path(path))
