"""`coordd doctor`: prints the findings of `checkup`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from coordd.launch.checkup import checkup
from coordd.launch.console import wide_console
from coordd.launch.finding import Finding, Health

__all__ = ["doctor"]

_LONGEST = 10_000  # longer than any path
_MARKS = {Health.GOOD: "[green]✓[/]", Health.NOTE: "[yellow]•[/]", Health.PROBLEM: "[red]✗[/]"}


def doctor(options: argparse.Namespace) -> int:
    """Runs `coordd doctor`; returns 1 if there is a problem, else 0."""
    findings = list(checkup())
    healthy = all(finding.health is not Health.PROBLEM for finding in findings)
    if options.json:
        told = [{**vars(finding), "health": finding.health.value} for finding in findings]
        sys.stdout.write(json.dumps({"healthy": healthy, "findings": told}, indent=2) + "\n")
    else:
        _show(findings, healthy=healthy)
    return 0 if healthy else 1


def _show(findings: Sequence[Finding], *, healthy: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        advice = f"\n[yellow]→ {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(_MARKS[finding.health], finding.what, escape(finding.found) + advice)
    console = wide_console(_LONGEST)
    console.print(table)
    console.print("\nAll is well." if healthy else "\nSee what to do at each [red]✗[/], then run coordd doctor again.")
