"""Writes ``docs/knobs.md`` from the knobs in the code, so that the page and the code agree.

Run as ``python -m coordd_tools.knob_table docs/knobs.md``; with ``--check`` it writes nothing and fails if the page is
stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from coordd.config import Knob, knobs
from coordd_tools.page import keep, line

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
    """Returns one knob as a row of a Markdown table."""
    cells = [_code(knob.name), _code(knob.variable), _flags(knob), _default(knob), knob.legal, knob.about]
    cells.append(_code(knob.alias) if knob.alias else "")
    return line(cells)


def _code(word: str) -> str:
    return f"`{word}`"


def _flags(knob: Knob) -> str:
    opposite = knob.flag.replace("--", "--no-", 1)
    return f"{_code(knob.flag)}, {_code(opposite)}" if knob.kind is bool else _code(knob.flag)


def _default(knob: Knob) -> str:
    return "empty" if knob.default in {None, ""} else _code(str(knob.default).lower())


def page(table: Iterable[Knob]) -> str:
    """Returns the whole page, in Markdown."""
    return _HEAD + "".join(map(row, table))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page that the command line names, or checks it; returns the exit code."""
    return keep(page(knobs()), arguments, command=_COMMAND, about=__doc__)


if __name__ == "__main__":
    sys.exit(main())
