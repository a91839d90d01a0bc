"""`coordd timeline`: merges the recordings of all ranks into one file, and breaks down the time of a step."""

from __future__ import annotations

import argparse
import csv
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordd.config import timeline_folder
from coordd.errors import ConfigError
from coordd.launch.console import wide_console

if TYPE_CHECKING:
    from coordd.monitoring.timeline.journal import Journal
    from coordd.monitoring.timeline.summary import Summary
    from coordd.monitoring.timeline.trace import Trace

__all__ = ["TIMELINE_EPILOG", "add_timeline_options", "collect", "timeline"]

_DOUBTFUL = 1e-3
"""Clock uncertainty in seconds above which a warning is printed."""

TIMELINE_EPILOG = """\
examples:
  coordd run -n 4 --timeline trace python train.py   record
  coordd timeline trace                              then look

Writes DIR/timeline.json, for https://ui.perfetto.dev and chrome://tracing, DIR/step.svg, a picture of one step, and
DIR/steps.csv, all steps of all ranks. Recordings that were cut off are read as far as they go.
"""


def add_timeline_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options of `coordd timeline` to the parser."""
    parser.add_argument("folder", metavar="DIR", help="what was given to --timeline, or to start_timeline")
    parser.add_argument(
        "--step", metavar="NAME", help="a tensor that comes once a step; default: one that repeats, and carries much"
    )


def timeline(options: argparse.Namespace) -> int:
    """Runs `coordd timeline`; returns the exit code.

    Raises:
        ConfigError: no tensor has the name given with ``--step``.
        TimelineError: there is no recording, or no readable one.
        OSError: a file cannot be read or written.
    """
    from coordd.monitoring.timeline.journal import Journal
    from coordd.monitoring.timeline.picture import picture
    from coordd.monitoring.timeline.summary import summarize
    from coordd.monitoring.timeline.terminal import show

    folder = Path(timeline_folder(options.folder))
    traces, target = collect(folder)
    for sentence in _flaws(traces):
        sys.stderr.write(f"coordd: {sentence}\n")
    journals = [Journal(trace.rank, trace.events()) for trace in traces]
    console = wide_console()
    if options.step:
        _check_step(options.step, journals)
    summary = summarize(journals, options.step)
    if summary is None:
        console.print("no step was found: nothing comes twice on all ranks")
    else:
        show(summary, console)
        (folder / "step.svg").write_text(picture(summary, journals), "utf-8")
        _save(summary, folder / "steps.csv")
        console.print(f"\nthe step in the middle: {folder / 'step.svg'}", soft_wrap=True, markup=False)
    console.print(f"all events, for https://ui.perfetto.dev: {target}", soft_wrap=True, markup=False)
    return 0


def collect(folder: Path) -> tuple[list[Trace], Path]:
    """Merges the recordings of all ranks into one file; returns the recordings and the path of the file.

    Raises:
        TimelineError: there is no recording, or no readable one.
        OSError: a file cannot be read or written.
    """
    from coordd.monitoring.timeline.merge import merge
    from coordd.monitoring.timeline.trace import find

    traces, target = find(folder), folder / "timeline.json"
    merge(traces, target)
    return traces, target


def _check_step(name: str, journals: Sequence[Journal]) -> None:
    known = {name for journal in journals for operation in journal.operations for name in operation.names}
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0) or ["nothing"]
        text = f"--step: no tensor {name!r} was recorded; what was is called {', '.join(near)} and so on"
        raise ConfigError(text)


def _flaws(traces: Sequence[Trace]) -> list[str]:
    """Returns one sentence for each flaw of the recordings: missing ranks, lost events, uncertain clocks."""
    found = []
    size, ranks = traces[0].about["size"], [trace.rank for trace in traces]
    if missing := sorted(set(range(size)) - set(ranks)):
        found.append(f"{len(missing)} of {size} ranks have no usable recording here, rank {missing[0]} for one")
    for trace in traces:
        if trace.damaged:
            found.append(f"rank {trace.rank}: {trace.damaged} damaged or cut off lines are left out")
        if trace.dropped:
            found.append(f"rank {trace.rank}: {trace.dropped} items are missing; the file was too slow for them")
        if trace.guessed:
            found.append(
                f"rank {trace.rank}: its clock was not compared with rank 0's; the hosts' time of day is taken"
            )
        elif trace.doubt > _DOUBTFUL:
            found.append(f"rank {trace.rank}: its times may be off by up to {1e3 * trace.doubt:.1f} ms")
    return found


def _save(summary: Summary, path: Path) -> None:
    """Writes all steps of all ranks as a table, in milliseconds."""
    from coordd.monitoring.timeline.breakdown import Part

    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["step", "rank", "since_s", "step_ms", *(f"{part.name.lower()}_ms" for part in Part)])
        for number, found in enumerate(summary.steps):
            for one in found:
                parts = [f"{1e3 * one.spent(part):.4f}" for part in Part]
                table.writerow([number, one.rank, f"{one.step.since:.6f}", f"{1e3 * one.seconds:.4f}", *parts])
