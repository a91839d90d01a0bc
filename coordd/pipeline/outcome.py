"""Costs of a step with a schedule: time, idle time, memory. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordd.pipeline.action import Kind
from coordd.pipeline.lowering import chain, lower
from coordd.pipeline.plan import Plan
from coordd.pipeline.schedules.registry import Choice
from coordd.pipeline.simulate import Costs, Timeline, simulate

__all__ = ["Outcome", "outcome", "versions"]

Pricing = Callable[[int, int], Costs]
"""Returns the costs of stages, given their number and the number of stages per rank."""


@dataclass(frozen=True)
class Outcome:
    """Costs of a step, in steady state.

    Attributes:
        name: name of the schedule.
        seconds: duration of a step.
        bubble: fraction of it in which ranks are idle.
        peak: the most memory of activations of a rank.
        versions: the most versions of its weights that a rank keeps, including the newest.
    """

    name: str
    seconds: float
    bubble: float
    peak: float
    versions: int


def outcome(choice: Choice, ranks: int, microbatches: int, pricing: Pricing, *, chunks: int | None = None) -> Outcome:
    """Simulates a schedule on one replica of a pipeline.

    If the pipeline does not drain between steps, the cost of a step is what one more step adds when the pipeline is
    full.

    Raises:
        ArgumentError: the schedule does not support these numbers.
    """

    def happens(steps: int) -> tuple[Plan, Timeline]:
        plan = choice.plan(ranks, microbatches, chunks=chunks, steps=steps)
        lowered = lower(plan, chain(plan.stages))
        return plan, simulate(lowered, pricing(plan.stages, plan.stages // ranks))

    plan, found = happens(1 if choice.flushes else _filling(ranks, microbatches))
    seconds, busy = found.makespan, _busy(found)
    if not choice.flushes:
        plan, longer = happens(_filling(ranks, microbatches) + 1)
        seconds, busy = longer.makespan - seconds, _busy(longer) - busy
        found = longer
    bubble = max(0.0, 1 - busy / (ranks * seconds)) if seconds else 0.0
    return Outcome(choice.name, seconds, bubble, max(found.peaks), versions(plan))


def _filling(ranks: int, microbatches: int) -> int:
    """Returns the number of steps after which a pipeline has been full for a while."""
    return 1 + -(-2 * ranks // microbatches)


def _busy(timeline: Timeline) -> float:
    return sum(map(timeline.busy, range(len(timeline.spans))))


def versions(plan: Plan) -> int:
    """Returns the most versions of its weights that a rank keeps: the newest, and the ones still needed."""
    if not plan.versions:
        return 1
    most = 1
    for actions in plan.actions:
        newest, needed = 0, dict[int, int]()
        for stage, kind, microbatch, _ in actions:
            if kind is Kind.STEP:
                newest += 1
            elif kind is Kind.FORWARD:
                needed[microbatch] = plan.versions[stage][microbatch]
            elif kind is Kind.BACKWARD:
                del needed[microbatch]
            most = max(most, len({newest, *needed.values()}))
    return most
