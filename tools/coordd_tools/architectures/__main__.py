"""The command line: ``python -m coordd_tools.architectures [NAME …]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coordd_tools.architectures.jobs import Result, results
from coordd_tools.architectures.models import ARCHITECTURES

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains the architectures in stages and in one process, prints a table, and returns 1 if one differs or fails."""
    options = _parser().parse_args(arguments)
    out = Console(width=max(120, Console().width))
    table = Table("architecture", "stages", "given", "result", "layers", "way", "seconds")
    found: list[Result] = []
    for result in results(options.names or list(ARCHITECTURES), options.stages, seconds=options.seconds):
        found.append(result)
        out.print(f"{result.name}, {result.stages} stages, {result.given}: {result.outcome}", highlight=False)
        table.add_row(
            result.name, str(result.stages), result.given, result.outcome.partition(":")[0], str(result.layers),
            result.way, f"{result.seconds:.0f}",
        )  # fmt: skip
    out.print(table)
    if options.json:
        options.json.write_text(json.dumps([vars(each) for each in found], indent=1) + "\n")
    return int(any(not each.outcome.startswith(("match", "refused")) for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.architectures", description=main.__doc__)
    parser.add_argument("names", nargs="*", choices=[*ARCHITECTURES, []], metavar="NAME", help="by default all of them")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="each is a job of as many ranks")
    parser.add_argument("--seconds", type=float, default=300.0, help="an architecture that takes longer has failed")
    parser.add_argument("--json", type=Path, help="where the results are written, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
