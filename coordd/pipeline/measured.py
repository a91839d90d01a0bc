"""The measured timeline of a plan, in the same form as the predicted one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from coordd.errors import ArgumentError
from coordd.pipeline.action import COMPUTE, SENDS, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Costs, Span, Timeline

__all__ = ["lag", "measured", "observed"]

_FREES = frozenset({Kind.BACKWARD, Kind.WEIGHT})


def measured(plan: Plan, spans: Sequence[Iterable[Span]], costs: Costs | None = None) -> Timeline:
    """Returns the timeline of what each rank has recorded; it begins with the first pass.

    Args:
        plan: the plan that was executed, lowered.
        spans: for each rank its actions and their times, in seconds of a common clock; only passes and steps count.
        costs: bytes kept and sent; without them both are 0.

    Raises:
        ArgumentError: spans of some ranks of the plan are missing, or an action ended before it began.
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
    """Returns the mean measured duration of the passes of each stage, with one unit of memory per microbatch and rank.

    A stage whose backward pass is sometimes split in two halves and sometimes whole has the costs of the halves.

    Simulating the plan with these costs gives the timeline without any waiting except for dependencies.
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
    """Returns how far this rank's clock is ahead of the first rank's, from barriers that both passed.

    No rank leaves a barrier before all have entered it, which bounds the lag from both sides; the error is at most half
    the difference of the bounds.

    Args:
        mine: for each barrier when this rank entered and left it, in seconds of its clock.
        first: when the first rank did, in seconds of its own clock.
    """
    meetings = list(zip(mine, first, strict=True))
    least = max(came - left for (came, _), (_, left) in meetings)
    most = min(left - came for (_, left), (came, _) in meetings)
    return (least + most) / 2


def _of(spans: Sequence[Iterable[Span]], kinds: Collection[Kind], since: float) -> tuple[tuple[Span, ...], ...]:
    """Returns the spans of some kinds, in seconds since ``since``."""
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
