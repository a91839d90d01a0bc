"""Tables: renders a report for the terminal, one row per subject and engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table

from coordd_tools.bench.report import Report

__all__ = ["Column", "digits", "render", "size_text", "spread"]

_NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """One column: a value of a figure's summary, or its ratio ``against`` an engine."""

    title: str
    figure: str
    against: str = ""
    show: Literal["median", "spread", "n"] = "median"

    def text(self, report: Report, subject: str, engine: str) -> str:
        """Returns the text of one row's cell; a dash if there is no value."""
        if self.against:
            ratio = report.ratio(subject, engine, self.figure, against=self.against)
            return _NOTHING if ratio is None else f"{ratio:.2f}"
        summary = report.summary(subject, engine, self.figure)
        if summary is None:
            return _NOTHING
        if self.show == "spread":
            return f"{digits(summary.p10)}..{digits(summary.p90)}"
        return str(summary.n) if self.show == "n" else digits(summary.median)


def spread(title: str, figure: str) -> tuple[Column, Column]:
    """Returns the columns of a figure's median and percentiles."""
    return Column(title, figure), Column("p10..p90", figure, show="spread")


def render(report: Report, columns: Sequence[Column], *, title: str) -> Table:
    """Renders the table of a report."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    rows = report.rows()
    for here, (subject, engine) in enumerate(rows):
        first = here == 0 or rows[here - 1][0] != subject
        last = here + 1 == len(rows) or rows[here + 1][0] != subject
        label = (size_text(int(subject)) if subject.isdigit() else subject) if first else ""
        table.add_row(label, engine, *(column.text(report, subject, engine) for column in columns), end_section=last)
    return table


def digits(value: float) -> str:
    """Formats a number with three significant digits, but at most three decimals."""
    if value == 0:
        return "0"
    places = min(3, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{places}f}"


def size_text(size: int) -> str:
    """Formats a number of bytes in the largest binary unit, up to MiB, that divides it."""
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"
