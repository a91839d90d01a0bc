"""Checks the size of source files and functions: a file is one chapter, a function one thought.

A file over the budget is split by chapters.
Run as ``python -m coordd_tools.line_budget FOLDER...``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FILE_LINES", "FUNCTION_LINES", "Size", "Sources", "main", "ninth_decile"]

FILE_LINES = 600
FUNCTION_LINES = 30


@dataclass(frozen=True, order=True)
class Size:
    """The number of lines of a file or function, and its place."""

    lines: int
    place: str


@dataclass(frozen=True)
class Sources:
    """The sizes of all Python files below a folder, and of all functions in them.

    A function is measured from ``def`` to its last statement, docstring included.
    """

    folder: Path
    files: tuple[Size, ...]
    functions: tuple[Size, ...]

    @classmethod
    def measure(cls, folder: Path) -> Sources:
        """Measures a folder.

        Raises:
            SyntaxError: a file is not Python.
        """
        texts = {path: path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
        files = tuple(Size(len(text.splitlines()), str(path)) for path, text in texts.items())
        return cls(folder, files, tuple(size for path, text in texts.items() for size in _functions(path, text)))

    def __str__(self) -> str:
        longest = max(size.lines for size in self.files) if self.files else 0
        typical = ninth_decile(self.functions)
        return f"{self.folder}: longest file {longest}/{FILE_LINES} lines, p90 of functions {typical}/{FUNCTION_LINES}"

    def excess(self) -> list[str]:
        """Lists everything over budget, in sentences; empty if nothing is."""
        return [*self._long_files(), *self._long_functions()]

    def _long_files(self) -> Iterator[str]:
        for size in self.files:
            if (over := size.lines - FILE_LINES) > 0:
                yield f"{size.place} has {size.lines} lines, {over} over {FILE_LINES}: make a file of each noun in it"

    def _long_functions(self) -> Iterator[str]:
        if (typical := ninth_decile(self.functions)) > FUNCTION_LINES:
            yield (
                f"below {self.folder} more than one function in ten is over {FUNCTION_LINES} lines (p90 is {typical}): "
                "give their steps names, in the longest first"
            )
            for size in sorted(self.functions, reverse=True):
                if size.lines > FUNCTION_LINES:
                    yield f"  {size.place} has {size.lines} lines"


def _functions(path: Path, text: str) -> Iterator[Size]:
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Size((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.lineno} {node.name}")


def ninth_decile(sizes: Sequence[Size]) -> int:
    """Returns the number of lines that nine in ten do not exceed; 0 for no sizes."""
    nine_in_ten = -(-9 * len(sizes) // 10)
    return sorted(sizes)[nine_in_ten - 1].lines if sizes else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each folder on the command line, then everything over budget; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.line_budget", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    excess: list[str] = []
    for folder in parser.parse_args(arguments).folders:
        if not folder.is_dir():
            parser.error(f"{folder} is no folder")
        sources = Sources.measure(folder)
        print(sources)
        excess += sources.excess()
    for sentence in excess:
        print(sentence)
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
