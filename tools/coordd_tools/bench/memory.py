"""Benchmark of an engine's peak memory per rank during training steps, relative to a rank without exchange.

Memory is the proportional set size: a page that several processes map counts for each by its share, so shared memory
counts once. It is sampled; a peak shorter than the time between two samples may be missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from coordd_tools.bench.blocks import Block, by_subject
from coordd_tools.bench.report import Report, figures
from coordd_tools.bench.tables import Column, spread

__all__ = ["COLUMNS", "report"]

FLOOR = "none"
COLUMNS = (
    *spread("peak MiB", "peak_mib"),
    Column("+ MiB", "extra_mib"),
    Column("÷ gradients", "extra_over_gradients"),
    Column("n", "peak_mib", show="n"),
)


def report(joined: Sequence[tuple[Block, ...]]) -> Report:
    """Builds the report of a run of process groups, one for each engine and model."""
    peaks = by_subject(joined, lambda row: [statistics.mean(block.peak_bytes for block in row)])
    weights = {row[0].subject: row[0].gradient_bytes for row in joined}
    floors = {model: statistics.median(found) for (model, engine), found in peaks.items() if engine == FLOOR}
    extra = {
        (model, engine): [peak - floors[model] for peak in found]
        for (model, engine), found in peaks.items()
        if engine != FLOOR and model in floors
    }
    relative = {(model, engine): [each / weights[model] for each in found] for (model, engine), found in extra.items()}
    return Report(
        (
            *figures("peak_mib", peaks, scale=1 / (1 << 20)),
            *figures("extra_mib", extra, scale=1 / (1 << 20)),
            *figures("extra_over_gradients", relative),
        ),
        (),
    )
