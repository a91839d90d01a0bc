"""The command line: ``python -m coordd_tools.stages {speedup,growth,cap}``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from coordd_tools.bench.group import GroupError

__all__ = ["main"]

_MIB, _GIB = 1 << 20, 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one measurement and prints its figures; returns the exit code."""
    options = _parser().parse_args(arguments)
    errors, out = Console(stderr=True), Console(width=max(100, Console().width))
    try:
        with errors.status(f"{options.noun}: starting") as status:
            rows = options.measure(options, status.update, out)
    except GroupError as error:
        errors.print(f"stages: {error}", markup=False)
        return error.code
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return 0


Tell = Callable[[str], None]


def _speedup(options: argparse.Namespace, tell: Tell, out: Console) -> list[Any]:
    from coordd_tools.stages import cnn, speedup

    tell("measuring the layers")
    took = cnn.calibrate(speedup.ROWS)
    cores = len(os.sched_getaffinity(0))
    cases = [case for case in speedup.CASES if not options.computed or case[0] * case[1] <= cores]
    table = _table("stages", "replicas", "layers", "ideal ms", "step ms", "of ideal", "speed-up", "ideal", "paper")
    rows: list[speedup.Row] = []
    for row in speedup.measure(took, cases, schedule=options.schedule, steps=options.steps, computed=options.computed):
        rows.append(row)
        tell(f"{row.stages} stages, {row.replicas} replicas: {1e3 * row.seconds:.0f} ms")
        paper = speedup.PAPER[row.stages, row.replicas]
        table.add_row(
            *(str(row.stages), str(row.replicas), "+".join(map(str, row.layers))),
            *(f"{1e3 * row.ideal:.0f}", f"{1e3 * row.seconds:.0f}", f"{row.efficiency:.1%}"),
            *(f"{row.speedup(rows[0]):.2f}", f"{row.limit(rows[0]):.2f}", f"{paper:.2f}"),
        )
    layers = ", ".join(f"{each.name} {1e3 * each.forward:.1f} + {1e3 * each.backward:.1f}" for each in took)
    way = "computed" if options.computed else "asleep for as long as they were measured to compute"
    out.print(f"{options.schedule}, {speedup.MICROBATCHES} microbatches of {speedup.ROWS} images; layers {way}", table)
    out.print(f"ms of a microbatch, forward + backward: {layers}", highlight=False)
    return rows


def _growth(options: argparse.Namespace, tell: Tell, out: Console) -> list[Any]:
    from coordd_tools.stages import growth

    table = _table("schedule", "microbatches", *(f"rank {rank}" for rank in range(options.ranks)))
    rows = []
    for row in growth.measure(options.ranks, growth.SCHEDULES, growth.MICROBATCHES):
        rows.append(row)
        tell(f"{row.schedule}, {row.microbatches} microbatches: {max(row.peaks) / _MIB:.0f} MiB")
        table.add_row(row.schedule, str(row.microbatches), *(f"{peak / _MIB:.0f}" for peak in row.peaks))
    out.print("MiB that a step adds to a rank's memory at its peak", table)
    return rows


def _cap(options: argparse.Namespace, tell: Tell, out: Console) -> list[Any]:
    from coordd_tools.stages import cap

    need = int(options.gib * _GIB)
    table = _table("", "cap GiB", "peak GiB of each rank", "losses")
    rows = []
    for row in cap.measure(need, options.ranks):
        rows.append(row)
        tell(f"{row.way}: {row.failure or 'trained'}")
        table.add_row(
            row.way,
            f"{row.limit / _GIB:.2f}" if row.limit else "-",
            " ".join(f"{peak / _GIB:.2f}" for peak in row.peaks) or "-",
            " ".join(f"{loss:.6f}" for loss in row.losses) or "failed",
        )
    parameters = cap.layers_of(need) * cap.WIDTH**2
    out.print(f"{parameters / 1e6:.0f} M parameters; with gradients and AdamW's state {options.gib:g} GiB", table)
    for row in rows:
        if row.failure:
            out.print(f"{row.way}, under the cap: {row.failure}", markup=False, highlight=False)
    return rows


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.stages", description=__doc__)
    nouns = parser.add_subparsers(dest="noun", required=True)
    speedup = _noun(nouns, "speedup", "the paper's network in stages and replicas, against the ideal", _speedup)
    speedup.add_argument("--schedule", default="1f1b", help="of coordd plan (default: 1f1b)")
    speedup.add_argument("--steps", type=int, default=3, help="that are timed (default: 3)")
    speedup.add_argument("--computed", action="store_true", help="compute, where there are cores enough")
    growth = _noun(nouns, "growth", "memory of a step, by microbatches", _growth)
    growth.add_argument("-n", "--ranks", type=int, default=4, help="how many (default: 4)")
    cap = _noun(nouns, "cap", "a model three times as large as a rank's memory", _cap)
    cap.add_argument("-n", "--ranks", type=int, default=4, help="how many (default: 4)")
    cap.add_argument("--gib", type=float, default=4.5, help="what training the model needs (default: 4.5)")
    return parser


def _noun(nouns: Any, name: str, about: str, measure: Callable[..., list[Any]]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = nouns.add_parser(name, help=about, description=about)
    parser.set_defaults(measure=measure)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also writes all figures as JSON")
    return parser
