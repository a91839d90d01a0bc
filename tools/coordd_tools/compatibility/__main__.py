"""Writes ``docs/horovod-compatibility.md`` from Horovod's names and the code itself.

Run as ``python -m coordd_tools.compatibility docs/horovod-compatibility.md``; with ``--check`` it only fails on a stale
page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from coordd_tools.compatibility.judge import judge
from coordd_tools.compatibility.surface import SURFACE, Name
from coordd_tools.page import keep, line

__all__ = ["main", "page", "row"]

_COMMAND = "python -m coordd_tools.compatibility docs/horovod-compatibility.md"

_HEAD = f"""\
# Compatibility with Horovod

Written by `{_COMMAND}` from the signatures of Horovod 0.28 and from the code; do not edit.

Every public name of `horovod.torch`, as `coordd run --as-horovod` provides it and, but for `init`, the questions about
the build and the errors, as `coordd.torch` has it. *Same*: a call that Horovod takes is taken, and means the same.
*Better*: that, and more. *Refused*: what can be imported says this sentence when it is used. [Migrating from
Horovod](migrating-from-horovod.md) shows what else is different.
"""


def row(name: Name) -> str:
    """Writes one name as a row of a Markdown table."""
    called = name.name if name.signature is None else f"{name.name}({name.signature.removeprefix('self, ')})"
    verdict, why = judge(name)
    return line([f"`{called.replace('(self)', '()')}`", verdict, why])


def page(surface: Mapping[str, Sequence[Name]]) -> str:
    """Writes the whole page."""
    parts = [_HEAD]
    for title, names in surface.items():
        parts += [f"\n## {title}\n\n| Horovod's | here | in what, or why |\n|---|---|---|\n", *map(row, names)]
    return "".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page that the command line names, or checks it; returns the exit code."""
    return keep(page(SURFACE), arguments, command=_COMMAND, about=__doc__)


if __name__ == "__main__":
    sys.exit(main())
