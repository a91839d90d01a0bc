"""A model in stages: what a step takes with each engine, what its schedule would take at best, and the memory.

A reading is one block: the wall time a step of the slowest rank. The ideal is that of the schedule with stages that are
all alike, with messages that take no time, and with as many cores as ranks; but where there are fewer, they cannot do
more than all compute all the time. Forward and backward take what they do in one piece in the same round, and half of
backward is for the weights. Memory is what a rank's proportional set size at its peak is above that before the engine
was started; of the fullest rank, and the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from coordd.pipeline.catalogue import find
from coordd.pipeline.lowering import chain, lower
from coordd.pipeline.simulate import Costs, simulate
from coordd_tools.bench.blocks import Block, by_subject
from coordd_tools.bench.report import Report, figures, ratios
from coordd_tools.bench.tables import Column, spread

__all__ = ["COLUMNS", "FLOOR", "IDEAL", "PEER", "ideal", "report"]

FLOOR = "none"
PEER = "torch-1f1b"
IDEAL = "ideal"
"""The subject of the blocks that say what an engine's schedule would take."""

COLUMNS = (
    *spread("step ms", "step_ms"),
    Column(f"÷ {PEER}", "step_ms", against=PEER),
    Column("ideal ms", "ideal_ms"),
    Column("CPU ms", "cpu_ms"),
    Column("+ MiB", "extra_mib"),
    Column("mean", "mean_extra_mib"),
    Column(f"÷ {PEER}", "extra_mib", against=PEER),
    Column("n", "step_ms", show="n"),
)

Row = tuple[Block, ...]


def ideal(schedule: str, ranks: int, microbatches: int, *, forward: float, backward: float, cores: int) -> float:
    """Seconds of a step.

    Args:
        schedule: its name.
        ranks: how many there are.
        microbatches: of a step.
        forward: seconds of it for the whole model and batch.
        backward: likewise.
        cores: that the ranks share.
    """
    plan = find(schedule).plan(ranks, microbatches)
    parts = plan.stages * microbatches
    costs = Costs.even(
        plan.stages, forward=forward / parts, inward=backward / 2 / parts, weight=backward / 2 / parts
    )
    return max(simulate(lower(plan, chain(plan.stages)), costs).makespan, (forward + backward) / cores)


def report(joined: Sequence[Row]) -> Report:
    """Makes the report of a run: of the group with all engines, and of each one's own, which has no calls."""
    timed = [row for row in joined if row[0].subject != IDEAL and any(block.calls for block in row)]
    ideals = by_subject([row for row in joined if row[0].subject == IDEAL], lambda row: row[0].seconds)
    walls = by_subject(timed, lambda row: [max(block.mean_seconds for block in row if block.calls)])
    cpus = by_subject(timed, lambda row: [statistics.mean(b.cpu_seconds / b.calls for b in row if b.calls)])
    subject = next(iter(walls))[0]
    found = [
        *figures("step_ms", walls, scale=1e3),
        *figures("ideal_ms", {(subject, engine): each for (_, engine), each in ideals.items()}, scale=1e3),
        *figures("cpu_ms", cpus, scale=1e3),
        *figures("extra_mib", _memory(joined, max), scale=1 / (1 << 20)),
        *figures("mean_extra_mib", _memory(joined, statistics.mean), scale=1 / (1 << 20)),
    ]
    return Report(
        tuple(found), (*ratios(found, "step_ms", against=PEER), *ratios(found, "extra_mib", against=PEER))
    )


def _memory(
    joined: Sequence[Row], among: Callable[[Sequence[int]], float]
) -> dict[tuple[str, str], list[float]]:
    watched = [row for row in joined if row[0].peak_bytes]
    return by_subject(watched, lambda row: [among([block.peak_bytes for block in row])])
