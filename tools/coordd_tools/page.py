"""Pages that are written from the code, so that page and code agree."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["keep", "line"]


def line(cells: Iterable[str]) -> str:
    """Returns one row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def keep(fresh: str, arguments: Sequence[str] | None, *, command: str, about: str | None) -> int:
    """Writes the page that the command line names, or checks it; returns the exit code.

    Args:
        fresh: the text that the page should have.
        arguments: command-line arguments; None for this process's own.
        command: the command that writes the page; its last word is the page's path.
        about: the description of the command, for ``--help``.
    """
    parser = argparse.ArgumentParser(prog=command.rpartition(" ")[0], description=about)
    parser.add_argument("page", type=Path, help="the Markdown file")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is stale")
    given = parser.parse_args(arguments)
    if not given.check:
        given.page.write_text(fresh, "utf-8")
    elif not given.page.is_file() or given.page.read_text("utf-8") != fresh:
        print(f"{given.page} does not say what the code says; write it anew: {command}")
        return 1
    return 0
