"""Training steps: what they take, and what the exchange adds to them.

A reading is one block: the wall time a step of the slowest rank, and the CPU time a step, mean over ranks. The
overhead is paired: each round's step less the same round's step without exchange, so drift between rounds drops out.
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
    """The columns of a table beside this peer."""
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
    """Makes the report of a run over models, beside PyTorch's own."""
    return report_beside(_PEER, joined)


def report_beside(peer: str, joined: Sequence[tuple[Block, ...]]) -> Report:
    """Makes the report of a run over models, beside this peer."""
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
    """Takes each round's floor off the same round of every other engine."""
    return {
        (model, engine): [wall - floor for wall, floor in zip(rounds, walls[model, FLOOR], strict=True)]
        for (model, engine), rounds in walls.items()
        if engine != FLOOR and (model, FLOOR) in walls
    }
