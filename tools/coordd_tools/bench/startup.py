"""From a fresh interpreter to an initialised engine, phase by phase, on the slowest rank.

``init`` is what the engine adds: importing it and initialising it, where PyTorch is imported and MPI started already.
So it is the difference between a script with the engine and one without, free of the noise of two such seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordd_tools.bench.blocks import Block, by_subject
from coordd_tools.bench.report import Report, figures, ratios
from coordd_tools.bench.tables import Column, spread

__all__ = ["COLUMNS", "PEER", "report"]

PEER = "gloo"

COLUMNS = (
    *spread("ms", "start_ms"),
    Column(f"÷ {PEER}", "start_ms", against=PEER),
    Column("CPU ms", "cpu_ms"),
    Column("n", "start_ms", show="n"),
)


def report(joined: Sequence[tuple[Block, ...]]) -> Report:
    """Makes the report of a run of fresh process groups."""
    starts = by_subject(joined, lambda row: [max(block.mean_seconds for block in row)])
    found = figures("start_ms", starts, scale=1e3)
    cpus = by_subject(joined, lambda row: [max(block.cpu_seconds for block in row)])
    return Report((*found, *figures("cpu_ms", cpus, scale=1e3)), tuple(ratios(found, "start_ms", against=PEER)))
