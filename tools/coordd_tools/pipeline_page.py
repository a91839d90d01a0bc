"""Draws the pictures of ``docs/pipeline.md`` and writes its tables and printed plans, all from the simulator.

The page itself is written by hand; only the text between two comments, such as ``<!-- coordd plan ... -->`` and ``<!--
end -->``, is written here: the output of that command, or the table of schedules.
Run as ``python -m coordd_tools.pipeline_page docs/pipeline.md``; with ``--check`` it writes nothing and fails if
anything is stale.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from coordd.launch.cli import main as coordd
from coordd.pipeline.lowering import chain, lower
from coordd.pipeline.outcome import Outcome, outcome
from coordd.pipeline.picture import draw
from coordd.pipeline.schedules.registry import SCHEDULES, Choice
from coordd.pipeline.simulate import Costs, simulate
from coordd.pipeline.units import Units

__all__ = ["fresh", "main", "pictures", "table"]

_COMMAND = "python -m coordd_tools.pipeline_page docs/pipeline.md"
_FOLDER = "pictures"
_RANKS, _MICROBATCHES, _STEPS = 4, 8, 2
_SIZES = ((4, 8), (4, 32), (8, 32))
_BLOCK = re.compile(r"(<!-- (the schedules|coordd [^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def _costs(stages: int, chunks: int) -> Costs:
    """Returns costs in which a pass through a rank's layers takes one unit, however many stages they form."""
    share = [1 / chunks] * stages
    return Costs(share, share, share, activation=share)


def pictures() -> Mapping[str, str]:
    """Draws every schedule; returns SVG text by file name."""
    return {f"schedule-{name}.svg": _picture(choice) for name, choice in SCHEDULES.items()}


def _picture(choice: Choice) -> str:
    plan = choice.plan(_RANKS, _MICROBATCHES, steps=1 if choice.flushes else _STEPS)
    lowered = lower(plan, chain(plan.stages))
    timeline = simulate(lowered, _costs(plan.stages, plan.stages // _RANKS))
    return draw(lowered, timeline, units=Units("units", "activations"))


def table() -> str:
    """Returns a Markdown table of the costs of a step with each schedule."""
    heads = [f"{ranks} ranks, {microbatches} microbatches" for ranks, microbatches in _SIZES]
    lines = ["| schedule | stages a rank | " + " | ".join(heads) + " | versions of weights |", "|---" * 6 + "|"]
    for choice in SCHEDULES.values():
        found = [outcome(choice, *size, _costs) for size in _SIZES]
        cells = [f"`{choice.name}`", str(choice.chunks), *map(_cell, found), _versions(found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: Outcome) -> str:
    return f"{100 * one.bubble:.1f} %, {one.peak:.4g}"


def _versions(found: Sequence[Outcome]) -> str:
    counts = dict.fromkeys(str(one.versions) for one in found)
    return " to ".join(counts)


def fresh(page: str) -> str:
    """Returns the page with all its blocks written anew."""
    return _BLOCK.sub(lambda block: f"{block[1]}{_text(block[2])}\n{block[3]}", page)


def _text(source: str) -> str:
    if source == "the schedules":
        return table()
    shown = io.StringIO()
    with redirect_stdout(shown):
        coordd(shlex.split(source)[1:])
    lines = (line.rstrip() for line in shown.getvalue().splitlines())
    return "\n".join(["```sh", source, "```", "```", *lines, "```"])


def _stale(page: Path) -> Iterator[tuple[Path, str]]:
    """Yields the files that differ from the simulator's output, with the text they should have."""
    wanted = {page.parent / _FOLDER / name: text for name, text in pictures().items()}
    wanted[page] = fresh(page.read_text("utf-8"))
    for path, text in wanted.items():
        if not path.is_file() or path.read_text("utf-8") != text:
            yield path, text


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page that the command line names and its pictures, or checks them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.pipeline_page", description=__doc__)
    parser.add_argument("page", type=Path, help="the Markdown file; its pictures lie in the folder pictures beside it")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when something is stale")
    given = parser.parse_args(arguments)
    status = 0
    for path, text in _stale(given.page):
        if given.check:
            print(f"{path} does not show what the simulator says; write it anew: {_COMMAND}")
            status = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
