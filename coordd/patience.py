"""How to wait for data that MPI cannot announce: briefly awake if somebody waits for it, else in short naps."""

from __future__ import annotations

import os
import time

from coordd.bell import Bell

__all__ = ["Patience"]

_AWAKE = 150e-6
_SHORTEST, _LONGEST = 50e-6, 1e-3


class Patience:
    """Waits between two looks at the network."""

    def __init__(self) -> None:
        self._since = 0.0

    def restart(self) -> None:
        """Notes that something has happened."""
        self._since = time.monotonic()

    @property
    def short(self) -> bool:
        """Whether the wait is still so short that a nap would cost more than it saves."""
        return time.monotonic() - self._since < _AWAKE

    def spin(self) -> None:
        """Stays awake; whoever computes on this core goes first."""
        os.sched_yield()

    def doze(self, bell: Bell) -> None:
        """Naps, the longer the longer nothing has happened; ``bell`` ends a nap early."""
        waited = time.monotonic() - self._since
        bell.sleep(min(max(waited / 4, _SHORTEST), _LONGEST))
