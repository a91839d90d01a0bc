"""Prints a search on the terminal: bars of step time, and the best choice of each knob."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordd.tuning.autotune import Outcome, Progress, Trial
from coordd.tuning.legend import MARKS, changes, fastest, headline, percent, summary, word
from coordd.tuning.record import Record

__all__ = ["show"]

_COLOURS = {Outcome.FASTER: "green", Outcome.NO_GAIN: "bright_black", Outcome.UNCLEAR: "yellow", Outcome.OPEN: "blue"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_WIDTH = 24
_LONGEST = 1.35  # relative to the start; longer bars are cut off


def show(record: Record, console: Console) -> None:
    """Prints a record."""
    progress = record.progress
    console.print(f"[bold]{escape(headline(progress))}[/]")
    console.print(f"{escape(summary(progress))}\n", style="dim")
    if any(trial.ratios for trial in progress.trials):
        console.print(_trials(progress))
        console.print()
        console.print(_knobs(record))


def _trials(progress: Progress) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("#", justify="right")
    table.add_column("step time", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was changed", overflow="fold")
    table.add_row("", f"[dim]{_bar(1.0)}[/]", "0", "", "[dim]the start[/]")
    for number, trial in enumerate(progress.trials, 1):
        table.add_row(str(number), *_cells(trial, progress))
    return table


def _cells(trial: Trial, progress: Progress) -> tuple[str, str, str, str]:
    colour = _COLOURS[trial.outcome]
    what = escape(changes(trial.settings, progress.start))
    outcome = f"[{colour}]{MARKS[trial.outcome]} {trial.outcome.value}[/]"
    if not trial.ratios:
        return "", "", outcome, what
    return f"[{colour}]{_bar(trial.relative)}[/]", percent(trial.relative), outcome, what


def _bar(relative: float) -> str:
    eighths = round(8 * _WIDTH * min(relative, _LONGEST) / _LONGEST)
    return _EIGHTHS[-1] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _knobs(record: Record) -> Table:
    """Shows the fastest trial of each choice of each knob; low is fast."""
    progress = record.progress
    table = Table(box=None, pad_edge=False, show_header=False)
    for knob in record.space.tuned:
        lowest, chosen = fastest(progress, knob), getattr(progress.best, knob)
        low, high = min(lowest.values()), max(lowest.values())
        cells = []
        for choice in record.space.choices(knob):
            height = (lowest[choice] - low) / (high - low or 1.0) if choice in lowest else None
            cells.append(_choice(choice, height, chosen=choice == chosen))
        table.add_row(f"[bold]{knob}[/]", "  ".join(cells), f"[dim]{percent(low)} … {percent(high)}[/]")
    return table


def _choice(choice: float | str, height: float | None, *, chosen: bool) -> str:
    name = escape(word(choice))
    if height is None:
        return f"[dim]{name}[/]"
    text = f"{name} {_HEIGHTS[round(height * (len(_HEIGHTS) - 1))]}"
    return f"[bold green]{text}[/]" if chosen else text
