"""How to wait for data that MPI cannot announce: spin briefly, then yield, then sleep ever longer."""

from __future__ import annotations

import os
import time

from coordd.bell import Bell

__all__ = ["Patience"]

_SPIN = 20e-6
_YIELD = 200e-6
_LONGEST = 1e-3


class Patience:
    """Waits between two looks at the network."""

    def __init__(self) -> None:
        self._since: float | None = None

    def reset(self) -> None:
        """Forgets how long it has waited."""
        self._since = None

    def wait(self, bell: Bell, *, progressed: bool) -> None:
        """Waits a little, depending on how long nothing has happened.

        Args:
            bell: ends a sleep early.
            progressed: whether something has happened since the last call.
        """
        now = time.monotonic()
        if progressed or self._since is None:
            self._since = now
            return
        waited = now - self._since
        if waited < _SPIN:
            return
        if waited < _YIELD:
            os.sched_yield()
        else:
            bell.sleep(min(waited / 4, _LONGEST))
