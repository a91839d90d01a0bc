"""How to wait for data that MPI cannot announce: briefly awake if somebody waits for it, else in short naps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Sized

from coordd.bell import Bell

__all__ = ["Patience", "nap_precisely"]

_AWAKE_FOR_DATA, _AWAKE_FOR_WORDS = 300e-6, 80e-6
_AWAITED_NAP, _UNAWAITED_NAP, _LONGEST_NAP = 25e-6, 500e-6, 1e-3
_LEFT_OUT = 15
_SET_TIMER_SLACK = 29


class Patience:
    """Waits between two looks at the network."""

    def __init__(self) -> None:
        self._since = 0.0
        self._refused = 0
        self.crowded = False
        """Whether other ranks need this core, so that staying awake only keeps them from what is waited for."""

    def restart(self) -> None:
        """Notes that something has happened."""
        self._since = time.monotonic()

    def short(self, *, data: bool) -> bool:
        """Says whether the wait is still so short that a nap would cost more than it saves.

        Args:
            data: whether it is data that wakes nobody; words do, and data in common memory.
        """
        if self.crowded:
            return False
        return time.monotonic() - self._since < (_AWAKE_FOR_DATA if data else _AWAKE_FOR_WORDS)

    def spin(self) -> None:
        """Stays awake; whoever computes on this core goes first."""
        os.sched_yield()

    def offer(self, submitted: Callable[[], Sized]) -> None:
        """Yields the core to a script that may submit its next operation at once, as long as that comes of it.

        One that computes instead would be interrupted later, for this thread to go to sleep. So it is tried again only
        after some times.

        Args:
            submitted: lists what the script has submitted, and is not looked at yet.
        """
        if self._refused:
            self._refused -= 1
            return
        os.sched_yield()
        self._refused = 0 if submitted() else _LEFT_OUT

    def doze(self, bell: Bell, *, awaited: bool) -> None:
        """Naps, the longer the longer nothing has happened, and longer still if nobody waits; ``bell`` ends it."""
        shortest = _AWAITED_NAP if awaited else _UNAWAITED_NAP
        waited = time.monotonic() - self._since
        bell.sleep(min(max(waited / 16, shortest), _LONGEST_NAP))


def nap_precisely() -> None:
    """Lets this thread's naps end on time: by default Linux adds up to 50 microseconds to each."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1000, 0, 0, 0)
