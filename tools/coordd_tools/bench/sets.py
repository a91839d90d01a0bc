"""Benchmark of one process set while another one waits for a missing rank.

The first half of the ranks sums tensors as fast as it can. In the other half nothing happens (``idle``), or all ranks
but one have submitted an operation and wait (``stalled``). A block's rate is that of its slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordd_tools.bench.blocks import Block, by_subject
from coordd_tools.bench.report import Report, figures, ratios
from coordd_tools.bench.tables import Column, spread

__all__ = ["COLUMNS", "PEER", "report"]

PEER = "idle"

COLUMNS = (
    *spread("calls/s", "calls_per_second"),
    Column(f"÷ {PEER}", "calls_per_second", against=PEER),
    Column("GB/s", "rate_gbps"),
    Column("CPU µs", "cpu_us"),
    Column("n", "calls_per_second", show="n"),
)


def report(joined: Sequence[tuple[Block, ...]]) -> Report:
    """Builds the report of a run over sizes; ranks outside of the first half have no calls."""
    seconds = by_subject(joined, lambda row: [max(block.mean_seconds for block in row if block.calls)])
    cpus = by_subject(joined, lambda row: [max(block.cpu_seconds / block.calls for block in row if block.calls)])
    calls = {key: [1 / second for second in found] for key, found in seconds.items()}
    rates = {(size, engine): [int(size) * call for call in found] for (size, engine), found in calls.items()}
    found = [
        *figures("calls_per_second", calls),
        *figures("rate_gbps", rates, scale=1e-9),
        *figures("cpu_us", cpus, scale=1e6),
    ]
    return Report(tuple(found), tuple(ratios(found, "calls_per_second", against=PEER)))
