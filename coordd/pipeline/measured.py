"""What really came of a plan, in the form of what was to come of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from coordd.errors import ArgumentError
from coordd.pipeline.action import COMPUTE, SENDS, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Costs, Span, Timeline

__all__ = ["lag", "measured", "observed"]

_FREES = frozenset({Kind.BACKWARD, Kind.WEIGHT})


def measured(plan: Plan, spans: Sequence[Iterable[Span]], costs: Costs | None = None) -> Timeline:
    """Makes a timeline of what each rank has recorded, which begins when the first pass does.

    Args:
        plan: what was done, lowered.
        spans: for each rank what it did and when, in seconds of a clock that all share; passes and steps count, and
            what else is in it does not.
        costs: what was kept and what travelled, in bytes; without them both are 0.

    Raises:
        ArgumentError: not every rank of the plan has its spans, or something ended before it began.
    """
    if len(spans) != len(plan.actions):
        raise ArgumentError(f"spans of {len(spans)} ranks for a plan of {len(plan.actions)}: gather those of all ranks")
    ordered = [sorted(mine, key=lambda span: span.begin) for mine in spans]
    for rank, mine in enumerate(ordered):
        if wrong := [span for span in mine if span.end < span.begin]:
            raise ArgumentError(f"{wrong[0].action} of rank {rank} ended before it began: which clock was read?")
    since = min((span.begin for mine in ordered for span in mine if span.action.kind in COMPUTE), default=0.0)
    shifted, steps = _of(ordered, COMPUTE, since), _of(ordered, {Kind.STEP}, since)
    return Timeline(
        shifted,
        tuple(_peak(mine, costs) for mine in shifted),
        _volume(plan, costs),
        max((span.end for mine in shifted for span in mine), default=0.0),
        steps if any(steps) else (),
    )


def observed(plan: Plan, spans: Sequence[Iterable[Span]]) -> Costs:
    """Says what the passes of each stage have taken, in the mean, and keeps one unit of memory for a microbatch.

    A stage that goes back in two halves at times, and in one piece at others, has the costs of the halves.

    What comes of the plan with these costs is what would have happened without any waiting but for each other.
    """
    taken: dict[tuple[int, Kind], list[float]] = {}
    for mine in spans:
        for (stage, kind, _, _), begin, end in mine:
            taken.setdefault((stage, kind), []).append(end - begin)

    def mean(stage: int, *kinds: Kind) -> float:
        found = next((taken[stage, kind] for kind in kinds if (stage, kind) in taken), [0.0])
        return sum(found) / len(found)

    stages = range(plan.stages)
    chunks = max(map(len, plan.held))
    return Costs(
        [mean(stage, Kind.FORWARD) for stage in stages],
        [mean(stage, Kind.INPUT, Kind.BACKWARD) for stage in stages],
        [mean(stage, Kind.WEIGHT) for stage in stages],
        activation=[1 / chunks] * plan.stages,
    )


def lag(mine: Sequence[tuple[float, float]], first: Sequence[tuple[float, float]]) -> float:
    """Finds how far a clock is ahead of the first rank's, from barriers that both went through.

    Nobody leaves a barrier before all have come, which bounds it from both sides; half the difference is its doubt.

    Args:
        mine: for each barrier when this rank came and left, in seconds of its clock.
        first: when the first rank did, in seconds of its own.
    """
    meetings = list(zip(mine, first, strict=True))
    least = max(came - left for (came, _), (_, left) in meetings)
    most = min(left - came for (_, left), (came, _) in meetings)
    return (least + most) / 2


def _of(spans: Sequence[Iterable[Span]], kinds: Collection[Kind], since: float) -> tuple[tuple[Span, ...], ...]:
    """Those of some kinds, in seconds from then on."""
    return tuple(
        tuple(Span(action, begin - since, end - since) for action, begin, end in mine if action.kind in kinds)
        for mine in spans
    )


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
