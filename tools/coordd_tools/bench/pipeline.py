"""Benchmark of a model in stages: each engine's step time, the ideal time of its schedule, and its memory.

A reading is one block: the wall time of a step on the slowest rank. The ideal assumes equal stages, messages that take
no time, and as many cores as ranks; with fewer cores, it is at least the time in which all cores compute without a
pause. Forward and backward take as long as for the whole model in one process in the same round, and half of backward
computes the weight gradients.

Memory is that of the rank with the most, in fresh processes and after the first steps. ``+ MiB`` is its proportional
set size at the peak, minus that before the engine was started: it includes the engine's code, weights, and heap
overhead. ``step MiB`` is the memory allocated at the peak, minus that when the stages were ready: gradients,
activations, frames.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter

from coordd.pipeline.lowering import chain, lower
from coordd.pipeline.schedules.registry import find
from coordd.pipeline.simulate import Costs, simulate
from coordd_tools.bench.blocks import Block, by_subject
from coordd_tools.bench.report import Report, figures, ratios
from coordd_tools.bench.tables import Column, spread

__all__ = ["COLUMNS", "FLOOR", "IDEAL", "PEER", "ideal", "report"]

FLOOR = "none"
PEER = "torch-1f1b"
IDEAL = "ideal"
"""The subject of the blocks with the ideal times of the engines' schedules."""

COLUMNS = (
    *spread("step ms", "step_ms"),
    Column(f"÷ {PEER}", "step_ms", against=PEER),
    Column("ideal ms", "ideal_ms"),
    Column("CPU ms", "cpu_ms"),
    Column("+ MiB", "extra_mib"),
    Column("÷", "extra_mib", against=PEER),
    Column("step MiB", "allocated_mib"),
    Column("÷", "allocated_mib", against=PEER),
    Column("n", "step_ms", show="n"),
)

Row = tuple[Block, ...]


def ideal(schedule: str, ranks: int, microbatches: int, *, whole: tuple[float, float], cores: int) -> float:
    """Returns the ideal seconds of a step.

    Args:
        schedule: its name.
        ranks: number of ranks.
        microbatches: of a step.
        whole: seconds of a forward and of a backward pass of the whole model and batch.
        cores: number of cores that the ranks share.
    """
    plan = find(schedule).plan(ranks, microbatches)
    forward, backward = (seconds / plan.stages / microbatches for seconds in whole)
    costs = Costs.even(plan.stages, forward=forward, inward=backward / 2, weight=backward / 2)
    return max(simulate(lower(plan, chain(plan.stages)), costs).makespan, sum(whole) / cores)


def report(joined: Sequence[Row]) -> Report:
    """Builds the report of a run: the group with all engines, and each engine's memory group, which has no calls."""
    timed = [row for row in joined if row[0].subject != IDEAL and any(block.calls for block in row)]
    ideals = by_subject([row for row in joined if row[0].subject == IDEAL], lambda row: row[0].seconds)
    walls = by_subject(timed, lambda row: [max(block.mean_seconds for block in row if block.calls)])
    cpus = by_subject(timed, lambda row: [statistics.mean(b.cpu_seconds / b.calls for b in row if b.calls)])
    subject = next(iter(walls))[0]
    found = [
        *figures("step_ms", walls, scale=1e3),
        *figures("ideal_ms", {(subject, engine): each for (_, engine), each in ideals.items()}, scale=1e3),
        *figures("cpu_ms", cpus, scale=1e3),
        *figures("extra_mib", _memory(joined, attrgetter("peak_bytes")), scale=1 / (1 << 20)),
        *figures("allocated_mib", _memory(joined, attrgetter("allocated_bytes")), scale=1 / (1 << 20)),
    ]
    against = [
        ratio for name in ("step_ms", "extra_mib", "allocated_mib") for ratio in ratios(found, name, against=PEER)
    ]
    return Report(tuple(found), tuple(against))


def _memory(joined: Sequence[Row], read: Callable[[Block], int]) -> dict[tuple[str, str], list[float]]:
    watched = [row for row in joined if any(map(read, row))]
    return by_subject(watched, lambda row: [max(map(read, row))])
