"""Virtual time: a queue of actions, ordered by time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

__all__ = ["Agenda"]

Action = Callable[[], None]


class Agenda:
    """A queue of actions by due time; actions of the same time run in the order of their insertion."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Action]] = []
        self._tie = count()

    def at(self, time: float, action: Action) -> None:
        """Schedules an action at a time, or now if that has passed."""
        heapq.heappush(self._due, (max(time, self.now), next(self._tie), action))

    def after(self, delay: float, action: Action) -> None:
        """Schedules an action after some seconds."""
        self.at(self.now + delay, action)

    def run(self, *, limit: float) -> bool:
        """Runs all actions until ``limit`` seconds; returns whether none is left."""
        while self._due and self.now < limit:
            self.now, _, action = heapq.heappop(self._due)
            self.events += 1
            action()
        return not self._due
