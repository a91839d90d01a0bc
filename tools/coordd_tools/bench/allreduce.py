"""Benchmark of in-place sums of one tensor, for sizes from 4 bytes up.

The time of a call is that of its slowest rank. The 4-byte row is the latency, from submit to result. The rate is the
tensor's bytes over the time of the call (algorithm bandwidth); the bus bandwidth is 2 (n - 1) / n times that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from coordd_tools.bench.blocks import Block, by_subject
from coordd_tools.bench.report import Report, figures, ratios
from coordd_tools.bench.tables import Column, spread

__all__ = ["COLUMNS", "PEERS", "report"]

PEERS = ("gloo", "mpi", "memory")

COLUMNS = (
    *spread("µs", "call_us"),
    Column("MB/s", "rate_mbps"),
    *(Column(f"÷ {peer}", "call_us", against=peer) for peer in PEERS),
    Column("CPU µs", "cpu_us"),
    Column("n", "call_us", show="n"),
)


def report(joined: Sequence[tuple[Block, ...]]) -> Report:
    """Builds the report of a run over sizes."""
    calls = by_subject(joined, _slowest)
    rates = {(size, engine): [int(size) / second for second in calls[size, engine]] for size, engine in calls}
    cpus = by_subject(joined, lambda row: [sum(block.cpu_seconds / block.calls for block in row) / len(row)])
    found = [
        *figures("call_us", calls, scale=1e6),
        *figures("rate_mbps", rates, scale=1e-6),
        *figures("cpu_us", cpus, scale=1e6),
    ]
    compared = [ratios(found, name, against=peer) for name in ("call_us", "cpu_us") for peer in PEERS]
    return Report(tuple(found), tuple(itertools.chain(*compared)))


def _slowest(row: tuple[Block, ...]) -> list[float]:
    """Returns each call's time on its slowest rank."""
    return [max(call) for call in zip(*(block.seconds for block in row), strict=True)]
