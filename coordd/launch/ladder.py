"""When to end a job, and how hard: a ladder that is only climbed upwards.

One rule: pure. It is told what happened and when, and says which step is due; `coordd.launch.job` takes it.

```
 a rank failed ──▶ LISTEN ─▶ ASK ─▶ DISMISS ─▶ END ─▶ KILL
                              ▲        ▲
      Ctrl-C, SIGTERM ────────┘        └─── the second Ctrl-C; or every rank's command has ended
```

LISTEN lets the other ranks say what the failure meant to them. ASK sends them a signal. DISMISS is the second request,
on which each rank's process ends what is left of its command and exits (see `coordd.launch.rank`). END has the
MPI launcher end every rank, KILL kills it; then everything below it dies too.
"""

from __future__ import annotations

import enum
import math

__all__ = ["Ladder", "Rung"]


class Rung(enum.IntEnum):
    """How far we have climbed."""

    RUN = 0
    LISTEN = 1
    ASK = 2
    DISMISS = 3
    END = 4
    KILL = 5


# Seconds on each rung. After a failure all of them together stay within two.
_PATIENCE = {Rung.LISTEN: 0.6, Rung.ASK: 0.3, Rung.DISMISS: 0.3, Rung.END: 0.4, Rung.KILL: math.inf}
_CAUSE_MISSING = 1.0  # LISTEN, while all we heard were consequences: their cause is worth waiting for
_SETTLE = 0.05  # between two requests, so that they cannot melt into one; no more once every command has ended
_WIND_UP = 10.0  # for an MPI launcher to exit after its ranks have


class Ladder:
    """Decides when to take the next step; ``rung`` is the last one taken."""

    def __init__(self, size: int, *, grace: float) -> None:
        """Starts at the bottom.

        Args:
            size: number of ranks.
            grace: seconds that the commands get when the user, and not a failure, ends the job.
        """
        self.rung = Rung.RUN
        self._running = size
        self._grace = grace
        self._since = math.inf
        self._cause_known = False
        self._left = False
        self._wanted = Rung.RUN

    def end(self, now: float, *, failed: bool, consequence: bool, left: bool = False) -> None:
        """Takes note that a rank's command ended.

        Args:
            now: seconds from any start.
            failed: it did not end well.
            consequence: it only failed because another one had.
            left: it ended well but without `shutdown`: what fails because of that says so, and its process waits to be
                dismissed.
        """
        self._running -= 1
        self._left = self._left or left
        self._cause_known = self._cause_known or left or (failed and not consequence)
        if self.rung == Rung.RUN and (failed or not self._running):
            self.rung = Rung.LISTEN if failed or self._left else Rung.RUN
            self._since = now

    def ask(self) -> None:
        """Takes note that the user wants the job to end; said twice, at once."""
        self._wanted = Rung.ASK if max(self.rung, self._wanted) < Rung.ASK else Rung.DISMISS

    def due(self) -> float:
        """When the next step has to be taken."""
        if self._wanted > self.rung:
            return -math.inf
        return self._since + self._patience()

    def climb(self, now: float) -> Rung:
        """Takes the next step and says which it was."""
        if self._wanted > self.rung:
            self.rung = self._wanted
        else:
            self.rung = Rung(self.rung + 1) if self.rung else Rung.END
        self._since = now
        return self.rung

    def _patience(self) -> float:
        if self.rung == Rung.RUN:
            return _WIND_UP
        if self._running <= 0 and self.rung <= Rung.ASK:
            return _SETTLE
        if self.rung == Rung.LISTEN and not self._cause_known:
            return _CAUSE_MISSING
        if self._wanted == Rung.ASK == self.rung:
            return self._grace
        return _PATIENCE[self.rung]
