"""`coordd plan`: computes the cost of a pipeline schedule without running it, and draws the schedule."""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coordd.errors import ArgumentError, ConfigError
from coordd.launch.console import wide_console
from coordd.launch.prices import Prices

if TYPE_CHECKING:
    from rich.console import Console

    from coordd.pipeline.outcome import Outcome
    from coordd.pipeline.plan import Plan
    from coordd.pipeline.simulate import Timeline
    from coordd.pipeline.units import Units

__all__ = ["PLAN_EPILOG", "add_plan_options", "plan"]

_LARGE = 64
"""Number of ranks above which schedules that are slow to compute are left out of a comparison."""

_CHART = 100
"""Columns of the chart if the output is not a terminal."""

_STEPS = 2
"""Number of steps shown for a schedule without a flush."""

PLAN_EPILOG = """\
examples:
  coordd plan --stages 4 --microbatches 8                                      1F1B, all passes equally long
  coordd plan --stages 4 --microbatches 8 --schedule interleaved --out p.svg   draws it, too
  coordd plan --stages 4 --microbatches 8 --compare --memory 4                 all schedules side by side
  coordd plan --stages 4 --microbatches 8 --actions                            what each rank does, in order
  coordd plan --stages 4 --microbatches 8 --model my:build --sample my:batch   layers of a model, measured
  coordd plan --measured run.json --out run.svg                                what Pipeline.record has written

Times are of one rank's share of the layers, however many stages it is cut into. Without any, a pass takes one unit.
Memory is counted in activations of such a share, of one microbatch.
"""


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options of `coordd plan` to the parser."""
    parser.add_argument(
        "--stages",
        type=_count,
        metavar="N",
        help="ranks of a pipeline; each has a stage, or chunks of it",
    )
    parser.add_argument("--microbatches", type=_count, metavar="N", help="of each replica, in a step")
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="default: 1f1b; --compare lists them")
    parser.add_argument("--chunks", type=_count, metavar="N", help="pieces that a rank's stage is cut into")
    parser.add_argument(
        "--replicas",
        type=_replicas,
        default=1,
        metavar="N",
        help="of the whole pipeline, or of each stage: 2,1; default: 1",
    )
    parser.add_argument(
        "--steps", type=_count, metavar="N", help="for schedules without a flush: how many to show; default: 2"
    )
    parser.add_argument("--forward", type=_seconds, metavar="SECONDS", help="of a forward pass")
    parser.add_argument("--backward", type=_seconds, metavar="SECONDS", help="of the gradients of inputs")
    parser.add_argument("--weight", type=_seconds, metavar="SECONDS", help="of the gradients of weights")
    parser.add_argument("--transfer", type=_seconds, metavar="SECONDS", help="from a rank to the next one; default: 0")
    parser.add_argument("--compare", action="store_true", help="show all schedules side by side")
    parser.add_argument(
        "--memory", metavar="N", help="activations that a rank can keep, or, with --model, bytes in all: 2GiB"
    )
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="builds the model whose layers are measured")
    parser.add_argument("--sample", metavar="MODULE:FUNCTION", help="makes its inputs: a batch, cut as in training")
    parser.add_argument("--split", default="time", metavar="BY", help="time, memory, parameters, layers; default: time")
    parser.add_argument("--recompute", action="store_true", help="of activations, for the model's backward pass")
    parser.add_argument(
        "--state", type=_seconds, default=2.0, metavar="N", help="bytes that its optimizer keeps for one of weights"
    )
    parser.add_argument("--measured", type=Path, metavar="FILE", help="show a run that Pipeline.record has written")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw the schedule: a .svg or .png")
    parser.add_argument("--actions", action="store_true", help="print what each rank does, in order")


def plan(options: argparse.Namespace) -> int:
    """Runs `coordd plan`; returns the exit code.

    Raises:
        ConfigError: the schedule does not support these numbers, or the picture's file name has an unknown suffix.
        OSError: the picture cannot be written.
    """
    if options.memory is not None and not (options.compare or options.model):
        raise ConfigError("--memory chooses between schedules: add --compare")
    missing = [f"--{name}" for name in ("stages", "microbatches") if getattr(options, name) is None]
    if missing and options.measured is None:
        raise ConfigError(f"say {' and '.join(missing)}, or --measured")
    try:
        with _uncollected():
            _plan(options) if options.measured is None else _replay(options)
    except ArgumentError as error:
        raise ConfigError(str(error)) from error
    return 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disables the garbage collector: on a large plan's million small objects it would take a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan(options: argparse.Namespace) -> None:
    from coordd.pipeline.export import check_ending
    from coordd.pipeline.lowering import chain, lower
    from coordd.pipeline.picture import draw
    from coordd.pipeline.report import per_stage
    from coordd.pipeline.schedules.registry import find
    from coordd.pipeline.simulate import simulate

    choice = find(options.schedule)
    if options.out is not None:
        check_ending(options.out)
    steps = options.steps or (1 if choice.flushes else _STEPS)
    found = choice.plan(
        options.stages, options.microbatches, chunks=options.chunks, replicas=options.replicas, steps=steps
    )
    lowered = lower(found, chain(found.stages))
    if options.actions:
        sys.stdout.write(f"{lowered}\n")
        return
    prices = Prices(options)
    timeline = simulate(lowered, prices.costs(found, found.stages, found.stages // options.stages))
    console = wide_console()
    _show(console, lowered, timeline, prices.units)
    if prices.profile is not None:
        spans = prices.spans(found)
        console.print()
        console.print(per_stage(prices.profile, spans, prices.memory(found), prices.units))
    if options.compare:
        console.print()
        _compare(options, prices)
    if options.out is not None:
        _save(console, draw(lowered, timeline, units=prices.units), options.out)


def _replay(options: argparse.Namespace) -> None:
    """Shows the predicted and the measured timeline of a recorded run."""
    from coordd.pipeline.export import check_ending
    from coordd.pipeline.recording import Recording

    if options.out is not None:
        check_ending(options.out)
    found = Recording.read(options.measured)
    console = wide_console()
    for name, timeline in (("predicted", found.predicted), ("measured", found.measured)):
        console.print(f"{name}:", style="bold")
        _show(console, found.plan, timeline, found.units)
        console.print()
    if options.out is not None:
        _save(console, found.picture(), options.out)


def _show(console: Console, plan: Plan, timeline: Timeline, units: Units) -> None:
    """Prints the headline, the table per rank and the chart."""
    from coordd.pipeline.chart import chart
    from coordd.pipeline.report import headline, per_rank

    console.print(headline(plan, timeline, units), style="bold", soft_wrap=True)
    console.print()
    console.print(per_rank(plan, timeline, units))
    console.print()
    width = console.width if console.is_terminal else _CHART
    console.print(chart(plan, timeline, width), soft_wrap=True, markup=False)


def _save(console: Console, picture: str, path: Path) -> None:
    from coordd.pipeline.export import save

    save(picture, path)
    console.print(f"\nthe picture: {path}", soft_wrap=True, markup=False)


def _compare(options: argparse.Namespace, prices: Prices) -> None:
    from coordd.pipeline.report import comparison
    from coordd.pipeline.schedules.registry import SCHEDULES

    console = wide_console()
    notes: list[str] = []
    found = list(_outcomes(options, prices, notes))
    flushing = [name for name, choice in SCHEDULES.items() if choice.flushes]
    console.print(comparison(found, prices.units, flushing=flushing, memory=prices.limit))
    notes.append("several versions of weights: gradients are not those of plain training, so these are never the best")
    for note in notes:
        console.print(note, style="dim", soft_wrap=True, markup=False)


def _outcomes(options: argparse.Namespace, prices: Prices, notes: list[str]) -> Iterator[Outcome]:
    """Computes the outcome of all schedules; adds a note for each schedule that is left out."""
    from coordd.pipeline.outcome import outcome
    from coordd.pipeline.schedules.registry import SCHEDULES

    for choice in SCHEDULES.values():
        if choice.slow and options.stages > _LARGE:
            notes.append(f"{choice.name} is left out: it is not worked out for more than {_LARGE} ranks")
            continue
        chunks = options.chunks if "chunks" in choice.takes else None
        try:
            plan = choice.plan(options.stages, options.microbatches, chunks=chunks)
            yield outcome(choice, options.stages, options.microbatches, partial(prices.costs, plan), chunks=chunks)
        except ArgumentError as error:
            notes.append(f"{choice.name} is left out: {error}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _replicas(text: str) -> int | tuple[int, ...]:
    numbers = tuple(map(_count, text.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number
