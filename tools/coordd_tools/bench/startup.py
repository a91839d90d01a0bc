"""Benchmark of startup: from a fresh interpreter to an initialized engine, phase by phase, on the slowest rank.

``init`` is the time that the engine adds: its import and initialization after PyTorch is imported and MPI started.
So it is the difference between a script with the engine and one without, without the noise of two startup times.
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
    """Builds the report of a run of fresh process groups."""
    starts = by_subject(joined, lambda row: [max(block.mean_seconds for block in row)])
    found = figures("start_ms", starts, scale=1e3)
    cpus = by_subject(joined, lambda row: [max(block.cpu_seconds for block in row)])
    return Report((*found, *figures("cpu_ms", cpus, scale=1e3)), tuple(ratios(found, "start_ms", against=PEER)))
