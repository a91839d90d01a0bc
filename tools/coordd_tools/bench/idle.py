"""Cost of an idle initialized engine: CPU time and wake-ups of the busiest rank while nothing is submitted.

The row ``mpi`` is the floor: the same process with only PyTorch imported and MPI started.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordd_tools.bench.blocks import Block, by_subject
from coordd_tools.bench.report import Report, figures
from coordd_tools.bench.tables import Column, spread

__all__ = ["COLUMNS", "report"]

COLUMNS = (
    *spread("% of a core", "cpu_percent"),
    Column("wake-ups/s", "wakeups_per_second"),
    Column("n", "cpu_percent", show="n"),
)


def report(joined: Sequence[tuple[Block, ...]]) -> Report:
    """Builds the report of a run of idle processes."""
    cpus = by_subject(joined, lambda row: [max(block.cpu_seconds / block.mean_seconds for block in row)])
    wakeups = by_subject(joined, lambda row: [max(block.switches / block.mean_seconds for block in row)])
    found = [*figures("cpu_percent", cpus, scale=100), *figures("wakeups_per_second", wakeups)]
    return Report(tuple(found), ())
