"""Tracebacks, kept for a moment: so each is shown in one piece, and once however many ranks fail alike.

One rule: pure, and never clever. From the first line of a traceback on, or of what `coordd.testimony` says in place of
one, all that a rank says on standard error is kept until it has been quiet. Only what is equal to the letter is shown
for several ranks, and tracebacks, one of which is the cause, come before testimonies.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

__all__ = ["TESTIMONY", "Told", "Tracebacks", "traceback_at"]

TESTIMONY = b"coordd.errors.PeerError: "
# A progress bar may stand before it, but not a group's margin: then it is of one of the group's errors.
# A SyntaxError of the script itself comes without the first line.
_FIRST = re.compile(
    rb'( *\+ Exception Group |(?<!\| )(?<!Group ))Traceback \(most recent call last\):$|^  File ".*", line \d+$'
)
_QUIET = 0.3  # seconds after which nobody has more to say
_LONGEST = 1.0  # seconds that anything is kept at most


class Told(NamedTuple):
    """What several ranks have said, with these, in order."""

    ranks: list[int]
    lines: tuple[bytes, ...]


class Tracebacks:
    """What ranks are saying."""

    def __init__(self) -> None:
        self._lines: dict[int, list[bytes]] = {}
        self._since = self._last = math.inf

    @property
    def due(self) -> float:
        """When what is kept has to be shown."""
        return min(self._last + _QUIET, self._since + _LONGEST)

    def __contains__(self, rank: int) -> bool:
        return rank in self._lines

    def keep(self, rank: int, line: bytes, *, now: float) -> bool:
        """Takes a line of standard error; ``False`` says that it is none of a traceback."""
        if rank not in self._lines and traceback_at(line) != 0 and not line.startswith(TESTIMONY):
            return False
        self._since = min(self._since, now)
        self._last = now
        self._lines.setdefault(rank, []).append(line)
        return True

    def release(self) -> list[Told]:
        """Hands out all that is kept, testimonies last."""
        told: dict[tuple[bytes, ...], list[int]] = {}
        for rank, lines in sorted(self._lines.items()):
            told.setdefault(tuple(lines), []).append(rank)
        self._lines.clear()
        self._since = self._last = math.inf
        stories = [Told(ranks, lines) for lines, ranks in told.items()]
        return sorted(stories, key=lambda story: story.lines[0].startswith(TESTIMONY))


def traceback_at(line: bytes) -> int | None:
    """Says where in a line a traceback begins."""
    found = _FIRST.search(line)
    return found.start() if found else None
