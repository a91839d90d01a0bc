"""The console that prints tables; it is wide if the output goes to a file or a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["wide_console"]

_WIDE = 240


def wide_console(width: int = _WIDE) -> Console:
    """Creates a console that is ``width`` columns wide if the output is not a terminal."""
    from rich.console import Console  # a slow import, which most commands do not need

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)
