"""`coordd plan`: works out what a schedule costs, before anything is started, and draws it."""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from coordd.errors import ArgumentError, ConfigError
from coordd.launch.console import wide_console

if TYPE_CHECKING:
    from coordd.pipeline.outcome import Outcome
    from coordd.pipeline.plan import Plan
    from coordd.pipeline.simulate import Costs, Timeline
    from coordd.pipeline.units import Units

__all__ = ["PLAN_EPILOG", "add_plan_options", "plan"]

_LARGE = 64
"""Ranks above which some schedules take too long to be worth a comparison."""

_CHART = 100
"""Columns of the chart where there is no terminal."""

_STEPS = 2
"""Steps that are shown of a pipeline that does not run empty between them."""

PLAN_EPILOG = """\
examples:
  coordd plan --stages 4 --microbatches 8                                      1F1B, all passes equally long
  coordd plan --stages 4 --microbatches 8 --schedule interleaved --out p.svg   draws it, too
  coordd plan --stages 4 --microbatches 8 --compare --memory 4                 all schedules side by side
  coordd plan --stages 4 --microbatches 8 --actions                            what each rank does, in order

Times are of one rank's share of the layers, however many stages it is cut into. Without any, a pass takes one unit.
Memory is counted in activations of such a share, of one microbatch.
"""


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options."""
    parser.add_argument(
        "--stages",
        type=_count,
        required=True,
        metavar="N",
        help="ranks of a pipeline; each has a stage, or chunks of it",
    )
    parser.add_argument("--microbatches", type=_count, required=True, metavar="N", help="of each replica, in a step")
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="default: 1f1b; --compare lists them")
    parser.add_argument("--chunks", type=_count, metavar="N", help="pieces that a rank's stage is cut into")
    parser.add_argument("--replicas", type=_count, default=1, metavar="N", help="of the whole pipeline; default: 1")
    parser.add_argument(
        "--steps", type=_count, metavar="N", help="for schedules without a flush: how many to show; default: 2"
    )
    parser.add_argument("--forward", type=_seconds, metavar="SECONDS", help="of a forward pass")
    parser.add_argument("--backward", type=_seconds, metavar="SECONDS", help="of the gradients of inputs")
    parser.add_argument("--weight", type=_seconds, metavar="SECONDS", help="of the gradients of weights")
    parser.add_argument("--transfer", type=_seconds, metavar="SECONDS", help="from a rank to the next one; default: 0")
    parser.add_argument("--compare", action="store_true", help="show all schedules side by side")
    parser.add_argument("--memory", type=_seconds, metavar="N", help="with --compare: activations that a rank can keep")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw the schedule: a .svg or .png")
    parser.add_argument("--actions", action="store_true", help="print what each rank does, in order")


def plan(options: argparse.Namespace) -> int:
    """Carries out `coordd plan`; returns the exit code.

    Raises:
        ConfigError: the schedule cannot have these numbers, or the picture not this ending.
        OSError: the picture cannot be written.
    """
    if options.memory is not None and not options.compare:
        raise ConfigError("--memory chooses between schedules: add --compare")
    try:
        with _uncollected():
            _plan(options)
    except ArgumentError as error:
        raise ConfigError(str(error)) from error
    return 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """A large plan is a million small values without cycles; looking for some takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan(options: argparse.Namespace) -> None:
    from coordd.pipeline.catalogue import find
    from coordd.pipeline.export import check_ending
    from coordd.pipeline.lowering import chain, lower
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
    timeline = simulate(lowered, _costs(options, found.stages, found.stages // options.stages))
    _show(options, lowered, timeline)


def _show(options: argparse.Namespace, plan: Plan, timeline: Timeline) -> None:
    """Prints the tables and the chart, and draws the picture."""
    from coordd.pipeline.chart import chart
    from coordd.pipeline.export import save
    from coordd.pipeline.picture import draw
    from coordd.pipeline.report import headline, per_rank

    console = wide_console()
    units = _units(options)
    console.print(headline(plan, timeline, units), style="bold", soft_wrap=True)
    console.print()
    console.print(per_rank(plan, timeline, units))
    console.print()
    width = console.width if console.is_terminal else _CHART
    console.print(chart(plan, timeline, width), soft_wrap=True, markup=False)
    if options.compare:
        console.print()
        _compare(options, units)
    if options.out is not None:
        save(draw(plan, timeline, units=units), options.out)
        console.print(f"\nthe picture: {options.out}", soft_wrap=True, markup=False)


def _compare(options: argparse.Namespace, units: Units) -> None:
    from coordd.pipeline.catalogue import SCHEDULES
    from coordd.pipeline.report import comparison

    console = wide_console()
    notes: list[str] = []
    found = list(_outcomes(options, notes))
    flushing = [name for name, choice in SCHEDULES.items() if choice.flushes]
    console.print(comparison(found, units, flushing=flushing, memory=options.memory))
    notes.append("several versions of weights: gradients are not those of plain training, so these are never the best")
    for note in notes:
        console.print(note, style="dim", soft_wrap=True, markup=False)


def _outcomes(options: argparse.Namespace, notes: list[str]) -> Iterator[Outcome]:
    """Works all schedules out; notes why some are left out."""
    from coordd.pipeline.catalogue import SCHEDULES
    from coordd.pipeline.outcome import outcome

    for choice in SCHEDULES.values():
        if choice.slow and options.stages > _LARGE:
            notes.append(f"{choice.name} is left out: it is not worked out for more than {_LARGE} ranks")
            continue
        chunks = options.chunks if "chunks" in choice.takes else None
        try:
            yield outcome(
                choice,
                options.stages,
                options.microbatches,
                lambda stages, chunks: _costs(options, stages, chunks),
                chunks=chunks,
            )
        except ArgumentError as error:
            notes.append(f"{choice.name} is left out: {error}")


def _timed(options: argparse.Namespace) -> bool:
    return any(getattr(options, name) is not None for name in ("forward", "backward", "weight", "transfer"))


def _units(options: argparse.Namespace) -> Units:
    from coordd.pipeline.units import Units

    return Units(time="s" if _timed(options) else "units", memory="activations")


def _costs(options: argparse.Namespace, stages: int, chunks: int) -> Costs:
    """What the stages cost: a pass that no time is given for takes as long as a forward pass."""
    from coordd.pipeline.simulate import Costs

    forward = 1.0 if options.forward is None else options.forward
    inward, weight = (forward if time is None else time for time in (options.backward, options.weight))
    transfer = {(stage, stage + 1): options.transfer or 0.0 for stage in range(stages - 1)}
    return Costs(
        [forward / chunks] * stages,
        [inward / chunks] * stages,
        [weight / chunks] * stages,
        transfer=transfer,
        activation=[1 / chunks] * stages,
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number
