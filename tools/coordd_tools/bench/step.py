"""Benchmark of training steps: their time, and the overhead of the gradient exchange.

A reading is one block: the wall time of a step on the slowest rank, and the CPU time of a step, averaged over ranks.
The overhead is paired: each round's step time minus that of the same round without exchange, which cancels drift
between rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordd_tools.bench.blocks import Block, by_subject
from coordd_tools.bench.report import Report, figures, ratios
from coordd_tools.bench.tables import Column, spread

__all__ = ["COLUMNS", "FLOOR", "columns", "report", "report_beside"]

FLOOR = "none"
_PEER = "ddp"


def columns(peer: str) -> tuple[Column, ...]:
    """Returns the columns of a table that compares with this peer."""
    return (
        *spread("step ms", "step_ms"),
        Column(f"÷ {peer}", "step_ms", against=peer),
        Column("+ ms", "overhead_ms"),
        Column(f"÷ {peer}", "overhead_ms", against=peer),
        Column("CPU ms", "cpu_ms"),
        Column("÷ floor", "cpu_ms", against=FLOOR),
        Column(f"÷ {peer}", "cpu_ms", against=peer),
        Column("n", "step_ms", show="n"),
    )


COLUMNS = columns(_PEER)


def report(joined: Sequence[tuple[Block, ...]]) -> Report:
    """Builds the report of a run over models, compared with PyTorch DDP."""
    return report_beside(_PEER, joined)


def report_beside(peer: str, joined: Sequence[tuple[Block, ...]]) -> Report:
    """Builds the report of a run over models, compared with this peer."""
    walls = by_subject(joined, lambda row: [max(block.mean_seconds for block in row)])
    cpus = by_subject(joined, lambda row: [sum(block.cpu_seconds / block.calls for block in row) / len(row)])
    found = [
        *figures("step_ms", walls, scale=1e3),
        *figures("overhead_ms", _over_floor(walls), scale=1e3),
        *figures("cpu_ms", cpus, scale=1e3),
    ]
    compared = [
        *ratios(found, "step_ms", against=FLOOR),
        *ratios(found, "step_ms", against=peer),
        *ratios(found, "overhead_ms", against=peer),
        *ratios(found, "cpu_ms", against=FLOOR),
        *ratios(found, "cpu_ms", against=peer),
    ]
    return Report(tuple(found), tuple(compared))


def _over_floor(walls: Mapping[tuple[str, str], Sequence[float]]) -> dict[tuple[str, str], list[float]]:
    """Subtracts each round's floor from the same round of every other engine."""
    return {
        (model, engine): [wall - floor for wall, floor in zip(rounds, walls[model, FLOOR], strict=True)]
        for (model, engine), rounds in walls.items()
        if engine != FLOOR and (model, FLOOR) in walls
    }
