"""Holds tracebacks briefly, so that each is shown in one piece, and once if several ranks fail in the same way.

One rule: pure and simple. From the first line of a traceback, or of the message that `coordd.daemon.testimony` prints
instead of one, a rank's standard error is held until it has been quiet for a while. Only identical texts are merged.
Tracebacks, one of which is the cause, are shown before the messages of `coordd.daemon.testimony`.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

__all__ = ["TESTIMONY", "Told", "Tracebacks", "traceback_at"]

TESTIMONY = b"coordd.errors.PeerError: "
# A progress bar may precede the traceback, but not the margin of an exception group: then it belongs to an error in
# the group. A SyntaxError of the script itself has no "Traceback" line.
_FIRST = re.compile(
    rb'( *\+ Exception Group |(?<!\| )(?<!Group ))Traceback \(most recent call last\):$|^  File ".*", line \d+$'
)
_QUIET = 0.3  # seconds without further lines after which held text is shown
_LONGEST = 1.0  # seconds that text is held at most


class Told(NamedTuple):
    """Equal output of several ranks, and these ranks, ascending."""

    ranks: list[int]
    lines: tuple[bytes, ...]


class Tracebacks:
    """The tracebacks that are held, by rank."""

    def __init__(self) -> None:
        self._lines: dict[int, list[bytes]] = {}
        self._since = self._last = math.inf

    @property
    def due(self) -> float:
        """Time at which the held text has to be shown."""
        return min(self._last + _QUIET, self._since + _LONGEST)

    def __contains__(self, rank: int) -> bool:
        return rank in self._lines

    def keep(self, rank: int, line: bytes, *, now: float) -> bool:
        """Holds a line of standard error; returns ``False``, and holds nothing, if it is not part of a traceback."""
        if rank not in self._lines and traceback_at(line) != 0 and not line.startswith(TESTIMONY):
            return False
        self._since = min(self._since, now)
        self._last = now
        self._lines.setdefault(rank, []).append(line)
        return True

    def release(self) -> list[Told]:
        """Removes and returns all held text; messages of `coordd.daemon.testimony` come last."""
        told: dict[tuple[bytes, ...], list[int]] = {}
        for rank, lines in sorted(self._lines.items()):
            told.setdefault(tuple(lines), []).append(rank)
        self._lines.clear()
        self._since = self._last = math.inf
        stories = [Told(ranks, lines) for lines, ranks in told.items()]
        return sorted(stories, key=lambda story: story.lines[0].startswith(TESTIMONY))


def traceback_at(line: bytes) -> int | None:
    """Returns the position in a line at which a traceback begins, or None."""
    found = _FIRST.search(line)
    return found.start() if found else None
