"""Polling for data that MPI cannot announce: busy for a short time if a thread waits for it, else in short naps."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time

from coordd.daemon.wakeup import Bell

__all__ = ["Patience", "nap_precisely"]

_AWAKE_FOR_DATA, _AWAKE_FOR_WORDS = 300e-6, 80e-6
_AWAITED_NAP, _UNAWAITED_NAP, _LONGEST_NAP = 25e-6, 500e-6, 1e-3
_PROMPT = 200e-6
_SET_TIMER_SLACK = 29


class Patience:
    """Chooses how to wait between two polls of the network."""

    def __init__(self) -> None:
        self._since = 0.0
        self._landed = math.inf
        self.prompt = True
        """Whether the script submitted its last operation right after the result of the one before."""
        self.crowded = False
        """Whether other ranks need this core, so that staying awake only delays the awaited data."""

    def restart(self) -> None:
        """Records that something has happened."""
        self._since = time.monotonic()

    def short(self, *, data: bool) -> bool:
        """Returns whether the wait is still so short that a nap would cost more than it saves.

        Args:
            data: whether it waits for data without a wake-up; votes and data in common memory cause one.
        """
        if self.crowded:
            return False
        return time.monotonic() - self._since < (_AWAKE_FOR_DATA if data else _AWAKE_FOR_WORDS)

    def spin(self) -> None:
        """Stays awake; a thread that computes on this core goes first."""
        os.sched_yield()

    def note_landed(self) -> None:
        """Records that a script gets a result."""
        self._landed = time.monotonic()

    def note_submitted(self) -> None:
        """Records that a script has submitted something."""
        self.restart()
        self.prompt = self._since - self._landed < _PROMPT

    def doze(self, bell: Bell, *, awaited: bool) -> None:
        """Naps, longer the longer nothing has happened, and longer still if no thread waits; ``bell`` ends it."""
        shortest = _AWAITED_NAP if awaited else _UNAWAITED_NAP
        waited = time.monotonic() - self._since
        bell.sleep(min(max(waited / 16, shortest), _LONGEST_NAP))


def nap_precisely() -> None:
    """Makes this thread's naps end on time: by default Linux adds up to 50 microseconds to each."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1000, 0, 0, 0)
