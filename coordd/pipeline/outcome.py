"""What a step costs with a schedule: time, idle time, memory. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordd.pipeline.action import Kind
from coordd.pipeline.catalogue import Choice
from coordd.pipeline.lowering import chain, lower
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Costs, Timeline, simulate

__all__ = ["Outcome", "outcome", "versions"]

Pricing = Callable[[int, int], Costs]
"""Says what stages cost, of their number and of how many each rank has."""


@dataclass(frozen=True)
class Outcome:
    """What a step costs, once the pipeline runs.

    Attributes:
        name: of the schedule.
        seconds: that a step takes.
        bubble: the part of it in which ranks are idle.
        peak: the most memory of activations of a rank.
        versions: of its weights that a rank keeps at most, the newest included.
    """

    name: str
    seconds: float
    bubble: float
    peak: float
    versions: int


def outcome(choice: Choice, ranks: int, microbatches: int, pricing: Pricing, *, chunks: int | None = None) -> Outcome:
    """Simulates a schedule on one replica of a pipeline.

    Where the pipeline does not run empty between steps, a step takes what one more step adds when it is full.

    Raises:
        ArgumentError: the schedule cannot have these numbers.
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
    """Steps after which a pipeline has been full for a while."""
    return 1 + -(-2 * ranks // microbatches)


def _busy(timeline: Timeline) -> float:
    return sum(map(timeline.busy, range(len(timeline.spans))))


def versions(plan: Plan) -> int:
    """Counts the versions of its weights that a rank keeps at most: the newest, and what microbatches still need."""
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
