"""Writes ``docs/horovod-compatibility.md`` from Horovod's names and from the code.

Run as ``python -m coordd_tools.compatibility docs/horovod-compatibility.md``; with ``--check`` it writes nothing and
fails if the page is stale.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from coordd_tools.compatibility.judge import judge
from coordd_tools.compatibility.name import Name, Part
from coordd_tools.compatibility.surface import SURFACE
from coordd_tools.page import keep, line

__all__ = ["main", "page", "row"]

_COMMAND = "python -m coordd_tools.compatibility docs/horovod-compatibility.md"

_HEAD = f"""\
# Compatibility with Horovod

Written by `{_COMMAND}` from the signatures of Horovod 0.28 and from the code; do not edit.

Every public name of `horovod.torch`, `horovod.tensorflow`, `horovod.tensorflow.keras` and `horovod.keras`, as
`coordd run --as-horovod` provides it and, but for `init`, the questions about the build and the errors, as
`coordd.torch`, `coordd.tensorflow` and `coordd.keras` have it. *Same*: a call that Horovod takes is taken, and means
the same. *Better*: that, and more. *Differs*: not every such call is taken, or means the same. *Refused*: what can be
imported says this sentence when it is used. [Migrating from Horovod](migrating-from-horovod.md) shows what else is
different.
"""


def row(name: Name, modules: Sequence[str]) -> str:
    """Returns the row of a Markdown table for one name, which all of the modules have."""
    called = name.name if name.signature is None else f"{name.name}({name.signature.removeprefix('self, ')})"
    verdict, why = judge(name, modules)
    return line([f"`{called.replace('(self)', '()')}`", verdict, why])


def page(surface: Sequence[Part]) -> str:
    """Returns the whole page, in Markdown."""
    parts = [_HEAD]
    for part in surface:
        parts.append(f"\n## {part.title}\n")
        for title, names in part.tables.items():
            parts.append(f"\n### {title}\n\n| Horovod's | here | in what, or why |\n|---|---|---|\n")
            parts += [row(name, part.modules) for name in names]
    return "".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page that the command line names, or checks it; returns the exit code."""
    return keep(page(SURFACE), arguments, command=_COMMAND, about=__doc__)


if __name__ == "__main__":
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}  # else it logs machine details
    sys.exit(main())
