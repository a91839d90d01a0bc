"""The console on which tables are shown: as wide as they are, where they go to a file or a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["wide_console"]

_WIDE = 240


def wide_console(width: int = _WIDE) -> Console:
    """Makes a console that folds nothing up to that width where there is no terminal."""
    from rich.console import Console  # takes a while, and most commands need none

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)
