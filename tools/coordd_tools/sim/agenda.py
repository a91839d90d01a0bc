"""Virtual time: what happens next, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

__all__ = ["Agenda"]

Action = Callable[[], None]


class Agenda:
    """Actions by the time at which they are due; those of the same time in the order in which they were entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Action]] = []
        self._tie = count()

    def at(self, time: float, action: Action) -> None:
        """Enters an action."""
        heapq.heappush(self._due, (max(time, self.now), next(self._tie), action))

    def after(self, delay: float, action: Action) -> None:
        """Enters an action that is due after some seconds."""
        self.at(self.now + delay, action)

    def run(self, *, limit: float) -> bool:
        """Carries out everything; says whether it came to an end before a time."""
        while self._due and self.now < limit:
            self.now, _, action = heapq.heappop(self._due)
            self.events += 1
            action()
        return not self._due
