"""Checks that the tests a page names exist, and that each row of its tables that should name a test names one.

Tests are written as `file.py::name`, with paths below the folder ``tests``. Files are read, not imported.
Run as ``python -m coordd_tools.named_tests docs/bad-input.md``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

__all__ = ["flaws", "main"]

_TEST = re.compile(r"`([\w/]+\.py)::(\w+(?:::\w+)?)`")
_PROOF = "shown by"
_PREFIXES = ("test_", "case_")


def flaws(page: str, tests: Path) -> Iterator[str]:
    """Yields the flaws of a page: tests that do not exist, and rows that name no test.

    Args:
        page: its text, in Markdown.
        tests: the folder that contains the named tests.
    """
    shown = False
    for line in page.splitlines():
        if not line.startswith("|"):
            shown = False
        elif line.rstrip(" |").endswith(_PROOF):
            shown = True
        elif shown and not line.startswith("|--") and not _TEST.search(line):
            yield f"names no test: {line.split('|')[1].strip()}"
        for file, name in _TEST.findall(line):
            if name not in _tests(tests / file):
                yield f"there is no test {file}::{name}"


@cache
def _tests(file: Path) -> frozenset[str]:
    """Returns the tests and cases of a file, methods as ``Class::name``; empty if there is no such file."""
    if not file.is_file():
        return frozenset()
    body = ast.parse(file.read_text("utf-8")).body
    groups = [("", body), *((f"{node.name}::", node.body) for node in body if isinstance(node, ast.ClassDef))]
    functions = [(group, node.name) for group, nodes in groups for node in nodes if isinstance(node, ast.FunctionDef)]
    return frozenset(group + name for group, name in functions if name.startswith(_PREFIXES))


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the pages that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.named_tests", description=__doc__)
    parser.add_argument("pages", type=Path, nargs="+", help="Markdown files")
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="the folder of the tests")
    given = parser.parse_args(arguments)
    found = [f"{page}: {flaw}" for page in given.pages for flaw in flaws(page.read_text("utf-8"), given.tests)]
    print(*found, sep="\n", end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
