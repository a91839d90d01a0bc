"""Writes ``docs/knobs.md`` from the knobs themselves, so that the page cannot say anything else than the code.

Run as ``python -m coordd_tools.knob_table docs/knobs.md``; with ``--check`` it only fails on a stale page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from coordd.config import Knob, knobs

__all__ = ["main", "page", "row"]

_COMMAND = "python -m coordd_tools.knob_table docs/knobs.md"

_HEAD = f"""\
# Knobs

Written by `{_COMMAND}` from `coordd/config.py`; do not edit.

Every knob can be set in three ways. An argument of `init` beats the environment, which beats the default; a flag of
`coordd run` sets the environment of every rank. Horovod's variables are read where coordd's own are not set.

| argument | environment | flag of `coordd run` | default | legal | what it is | Horovod's variable |
|---|---|---|---|---|---|---|
"""


def row(knob: Knob) -> str:
    """Writes one knob as a row of a Markdown table."""
    cells = [_code(knob.name), _code(knob.variable), _code(knob.flag), _default(knob), knob.legal, knob.about]
    cells.append(_code(knob.alias) if knob.alias else "")
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def _code(word: str) -> str:
    return f"`{word}`"


def _default(knob: Knob) -> str:
    return "empty" if knob.default in {None, ""} else _code(str(knob.default).lower())


def page(table: Iterable[Knob]) -> str:
    """Writes the whole page."""
    return _HEAD + "".join(map(row, table))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page that the command line names, or checks it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.knob_table", description=__doc__)
    parser.add_argument("page", type=Path, help="the Markdown file")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is stale")
    given = parser.parse_args(arguments)
    fresh = page(knobs())
    if not given.check:
        given.page.write_text(fresh, "utf-8")
    elif not given.page.is_file() or given.page.read_text("utf-8") != fresh:
        print(f"{given.page} does not say what coordd/config.py says; write it anew: {_COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
