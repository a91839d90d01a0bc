"""How to wait for data that MPI cannot announce: yield first, then sleep ever longer."""

from __future__ import annotations

import os
import time

from coordd.bell import Bell

__all__ = ["Patience"]

_YIELD = 300e-6
_LONGEST = 1e-3


class Patience:
    """Waits between two looks at the network."""

    def __init__(self) -> None:
        self._since = 0.0

    def restart(self) -> None:
        """Notes that something has happened, or that somebody has begun to wait."""
        self._since = time.monotonic()

    @property
    def short(self) -> bool:
        """Whether the wait is still so short that sleeping would cost more than it saves."""
        return time.monotonic() - self._since < _YIELD

    def wait(self, bell: Bell) -> None:
        """Waits a little, depending on how long nothing has happened; ``bell`` ends a sleep early."""
        waited = time.monotonic() - self._since
        if waited < _YIELD:
            os.sched_yield()  # lets whoever computes on this core go on; costs nothing if nobody does
        else:
            bell.sleep(min(waited / 4, _LONGEST))
