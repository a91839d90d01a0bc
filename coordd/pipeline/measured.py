"""What really came of a plan, in the form of what was to come of it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from coordd.errors import ArgumentError
from coordd.pipeline.action import COMPUTE, SENDS, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Costs, Span, Timeline

__all__ = ["costs", "measured"]

_FREES = frozenset({Kind.BACKWARD, Kind.WEIGHT})


def measured(plan: Plan, spans: Sequence[Iterable[Span]], costs: Costs | None = None) -> Timeline:
    """Makes a timeline of what each rank has recorded, which begins when the first pass does.

    Args:
        plan: what was done, lowered.
        spans: for each rank what it did and when, in seconds of a clock that all share; passes count, and what else is
            in it does not.
        costs: what was kept and what travelled, in bytes; without them both are 0.

    Raises:
        ArgumentError: not every rank of the plan has its spans, or something ended before it began.
    """
    if len(spans) != len(plan.actions):
        raise ArgumentError(f"spans of {len(spans)} ranks for a plan of {len(plan.actions)}: gather those of all ranks")
    passes = [
        sorted((span for span in mine if span.action.kind in COMPUTE), key=lambda span: span.begin) for mine in spans
    ]
    for rank, mine in enumerate(passes):
        if wrong := [span for span in mine if span.end < span.begin]:
            raise ArgumentError(f"{wrong[0].action} of rank {rank} ended before it began: which clock was read?")
    since = min((mine[0].begin for mine in passes if mine), default=0.0)
    shifted = tuple(tuple(Span(action, begin - since, end - since) for action, begin, end in mine) for mine in passes)
    return Timeline(
        shifted,
        tuple(_peak(mine, costs) for mine in shifted),
        _volume(plan, costs),
        max((span.end for mine in shifted for span in mine), default=0.0),
    )


def costs(plan: Plan, timeline: Timeline) -> Costs:
    """Finds what passes have taken: the median, by stage and kind.

    A backward pass in one piece counts as one for the inputs: where weights' gradients come with it, they cost nothing.

    Args:
        plan: what was done.
        timeline: when.
    """
    taken: dict[tuple[int, Kind], list[float]] = {}
    for span in (span for mine in timeline.spans for span in mine):
        kind = Kind.INPUT if span.action.kind is Kind.BACKWARD else span.action.kind
        taken.setdefault((span.action.stage, kind), []).append(span.end - span.begin)

    def of(kind: Kind) -> list[float]:
        return [statistics.median(taken.get((stage, kind), [0.0])) for stage in range(plan.stages)]

    return Costs(of(Kind.FORWARD), of(Kind.INPUT), of(Kind.WEIGHT))


def _peak(spans: Iterable[Span], costs: Costs | None) -> float:
    live = peak = 0.0
    for span in spans:
        size = costs.activation[span.action.stage] if costs and costs.activation else 0.0
        if span.action.kind is Kind.FORWARD:
            live += size
        elif span.action.kind in _FREES:
            live -= size
        peak = max(peak, live)
    return peak


def _volume(plan: Plan, costs: Costs | None) -> int:
    sends = (action for mine in plan.actions for action in mine if action.kind in SENDS)
    pairs = ((min(send.stage, send.peer), max(send.stage, send.peer)) for send in sends)
    return sum(costs.volume.get(pair, 0) for pair in pairs) if costs else 0
