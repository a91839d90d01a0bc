"""Prints a timeline summary: each rank's breakdown of a step, the ranks that came last, and the slowest steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordd.monitoring.timeline.breakdown import Breakdown, Part
from coordd.monitoring.timeline.spans import length
from coordd.monitoring.timeline.summary import Summary

__all__ = ["headline", "show"]

_COLOURS = {
    Part.COMPUTE: "green",
    Part.LATE: "red",
    Part.NEGOTIATION: "yellow",
    Part.TRANSFER: "blue",
    Part.REST: "bright_black",
}
_MARKS = {
    Part.COMPUTE: "#",
    Part.LATE: "!",
    Part.NEGOTIATION: "?",
    Part.TRANSFER: "=",
    Part.REST: ".",
}
"""Characters of the bars: different ones, because colours may be off, and ASCII, because every terminal has it."""
_WIDTH = 14
_SLOWEST = 5
_LATEST = 8


def headline(summary: Summary) -> str:
    """Returns the summary in one sentence; times are in milliseconds."""
    compute = summary.spent(Part.COMPUTE)
    exposed = summary.seconds - compute
    parts = ", ".join(f"{_ms(summary.spent(part))} {part.value}" for part in Part if part is not Part.COMPUTE)
    share = f"{100 * exposed / summary.seconds:.0f} %" if summary.seconds else "nothing"
    took = f"a step takes {_ms(summary.seconds)} ms: {_ms(compute)} compute, {_ms(exposed)} exposed communication"
    return f"{took}, {share} ({parts})"


def show(summary: Summary, console: Console) -> None:
    """Prints a summary."""
    console.print(f"[bold]{escape(headline(summary))}[/]")
    text = f"{len(summary.steps)} steps, known by {summary.anchor!r}; averages over the middle half of them, in ms"
    console.print(f"{escape(text)}\n", style="dim")
    console.print(_shares(summary))
    console.print(_legend())
    if summary.late:
        console.print()
        console.print(_late(summary))
    console.print()
    console.print(_slowest(summary))


def _shares(summary: Summary) -> Table:
    table = _table("rank", title="where a step goes")
    table.add_column("", no_wrap=True)
    for share in summary.shares:
        table.add_row(str(share.rank), *_cells(share.spent, share.seconds), _bar(share.spent, share.seconds))
    return table


def _legend() -> str:
    return "[dim]bars:[/]  " + "  ".join(f"[{_COLOURS[part]}]{mark} {part.value}[/]" for part, mark in _MARKS.items())


def _late(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title="who came last", title_justify="left")
    for name in ("rank", "operations", "share", "behind the next to last", "cost a step"):
        table.add_column(name, justify="right")
    for row in summary.late[:_LATEST]:
        cells = (row.rank, row.times, f"{100 * row.share:.0f} %", _ms(row.behind), _ms(row.cost))
        table.add_row(*map(str, cells))
    return table


def _slowest(summary: Summary) -> Table:
    """Returns the table of the slowest steps, averaged over the ranks."""
    table = _table("step", title="the slowest steps")
    table.add_column("latest", justify="right", no_wrap=True)
    order = sorted(range(len(summary.steps)), key=lambda number: -mean(one.seconds for one in summary.steps[number]))
    for number in order[:_SLOWEST]:
        found = summary.steps[number]
        spent = {part: mean(one.spent(part) for one in found) for part in Part}
        seconds = mean(one.seconds for one in found)
        table.add_row(str(number), *_cells(spent, seconds), _culprit(found))
    return table


def _table(first: str, *, title: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title=title, title_justify="left")
    for name in (first, "step"):
        table.add_column(name, justify="right")
    for part, colour in _COLOURS.items():
        table.add_column(part.value, justify="right", header_style=colour, no_wrap=True)
    return table


def _cells(spent: Mapping[Part, float], seconds: float) -> list[str]:
    return [_ms(seconds), *(_ms(spent[part]) for part in _COLOURS)]


def _bar(spent: Mapping[Part, float], seconds: float) -> str:
    """Draws the categories in proportion, rounded so that all bars have the same width."""
    text, drawn, reached = "", 0, 0.0
    for part, colour in _COLOURS.items():
        reached += spent[part]
        end = round(_WIDTH * reached / seconds) if seconds else 0
        text += f"[{colour}]{_MARKS[part] * (end - drawn)}[/]"
        drawn = end
    return text


def _culprit(found: Iterable[Breakdown]) -> str:
    """Returns the rank that caused the most waiting time in a step, or ""."""
    pieces = [piece for one in found for piece in one.pieces if piece.part is Part.LATE and piece.spans]
    lost: dict[int, float] = {}
    for piece in pieces:
        lost[piece.culprit] = lost.get(piece.culprit, 0.0) + length(piece.spans)
    return f"rank {max(lost, key=lambda rank: lost[rank])}" if lost else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 1 else f"{1e3 * seconds:.0f}"
