"""Simulation results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from coordd.errors import spans
from coordd.pipeline.lanes import lanes
from coordd.pipeline.load import Memory
from coordd.pipeline.outcome import Outcome
from coordd.pipeline.plan import Plan
from coordd.pipeline.profile import Profile
from coordd.pipeline.simulate import Timeline
from coordd.pipeline.units import Units

__all__ = ["best", "comparison", "headline", "per_rank", "per_stage"]

_ROWS = 16


def headline(plan: Plan, timeline: Timeline, units: Units) -> str:
    """Returns the result in one sentence."""
    step = f", step {units.span(timeline.step)}" if timeline.steps else ""
    return (
        f"{plan.name} on {len(plan.actions)} ranks, {plan.stages} stages, {plan.microbatches} microbatches: "
        f"makespan {units.span(timeline.makespan)}, bubble {100 * timeline.bubble:.1f} %, "
        f"peak {units.size(max(timeline.peaks))}{step}"
    )


def per_rank(plan: Plan, timeline: Timeline, units: Units) -> Table:
    """Returns a table of each rank, or run of ranks: mean times, maximum memory."""
    table = _table("rank", "stages", "computes", "idle", "peak")
    for lane in lanes(plan, _ROWS):
        busy = sum(map(timeline.busy, lane)) / len(lane)
        idle = 100 * (1 - busy / timeline.makespan) if timeline.makespan else 0.0
        held = spans({stage for rank in lane for stage in plan.held[rank]})
        peak = units.size(max(timeline.peaks[rank] for rank in lane))
        table.add_row(spans(lane), held, units.span(busy), f"{idle:.1f} %", peak)
    return table


def per_stage(profile: Profile, spans: Sequence[range], memory: Memory, units: Units) -> Table:
    """Returns a table of the stages of a split: costs for one microbatch, but all the memory that a stage holds."""
    table = _table("stage", "layers", "forward", "backward", "packing", "weights", "sends", "holds")
    borders = (
        [profile.borders[span.stop - 1].volume for span in spans[:-1]] if profile.borders else [0] * (len(spans) - 1)
    )
    for stage, (share, sent) in enumerate(zip(profile.shares(spans, memory), [*borders, 0], strict=True)):
        names = [profile.names[at] for at in (spans[stage].start, spans[stage].stop - 1)]
        times = (share.load.forward, share.load.backward, share.exchange)
        sizes = (share.load.parameters, sent, share.memory)
        layers = " to ".join(dict.fromkeys(names))
        table.add_row(str(stage), layers, *map(units.span, times), *map(units.size, sizes))
    return table


def comparison(found: Sequence[Outcome], units: Units, *, flushing: Iterable[str], memory: float | None) -> Table:
    """Returns a table of schedules, with the best marked; see `best`."""
    winner = best(found, flushing, memory=memory)
    table = _table("schedule", "a step takes", "bubble", "peak", "versions of weights")
    table.add_column("", no_wrap=True)
    within = "" if memory is None else f" within {units.size(memory)}"
    for one in found:
        mark = f"◀ best{within}" if one is winner else "too much memory" if _exceeds(one, memory) else ""
        cells = (one.name, units.span(one.seconds), f"{100 * one.bubble:.1f} %", units.size(one.peak))
        table.add_row(*cells, str(one.versions), mark, style="bold" if one is winner else None)
    return table


def best(found: Sequence[Outcome], flushing: Iterable[str], *, memory: float | None = None) -> Outcome | None:
    """Returns the schedule with the shortest step; among equal ones, the one with the lowest peak.

    Args:
        found: the schedules.
        flushing: names of the schedules whose gradients are those of plain training; others are not chosen.
        memory: the most that a rank's activations may take, if limited.

    Returns:
        The schedule, or None if none qualifies.
    """
    names = set(flushing)
    fitting = [one for one in found if one.name in names and not _exceeds(one, memory)]
    return min(fitting, key=lambda one: (one.seconds, one.peak), default=None)


def _exceeds(one: Outcome, memory: float | None) -> bool:
    return memory is not None and one.peak > memory


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    return table
