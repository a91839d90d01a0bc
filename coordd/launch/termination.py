"""The termination policy of a job: steps of increasing force, taken in order.

One rule: pure. It gets events with their times and returns the next step and its deadline; `coordd.launch.job` acts.

```
 a rank failed ──▶ LISTEN ─▶ ASK ─▶ DISMISS ─▶ END ─▶ KILL
                              ▲        ▲
      Ctrl-C, SIGTERM ────────┘        └─── the second Ctrl-C; or every rank's command has ended
```

LISTEN waits for the other ranks to report how the failure affected them. ASK sends them a signal. DISMISS is the
second request, on which each rank's process kills its command's process group and exits (see `coordd.launch.rank`).
END makes the MPI launcher end all ranks. KILL kills the launcher; then all its descendants die too.
"""

from __future__ import annotations

import enum
import math

__all__ = ["Ladder", "Rung"]


class Rung(enum.IntEnum):
    """The step that was taken last."""

    RUN = 0
    LISTEN = 1
    ASK = 2
    DISMISS = 3
    END = 4
    KILL = 5


# Seconds on each rung. After a failure their sum stays within two.
_PATIENCE = {Rung.LISTEN: 0.6, Rung.ASK: 0.3, Rung.DISMISS: 0.3, Rung.END: 0.4, Rung.KILL: math.inf}
_CAUSE_MISSING = 1.0  # seconds of LISTEN while only consequences of a failure were reported, and not its cause
_SETTLE = 0.05  # seconds between two requests, so that they arrive as two; enough once all commands have ended
_WIND_UP = 10.0  # seconds for an MPI launcher to exit after its ranks have exited


class Ladder:
    """Decides when to take the next step; ``rung`` is the step taken last."""

    def __init__(self, size: int, *, grace: float) -> None:
        """Starts at `Rung.RUN`.

        Args:
            size: number of ranks.
            grace: seconds for the commands to end when the user ends the job, rather than a failure.
        """
        self.rung = Rung.RUN
        self._running = size
        self._grace = grace
        self._since = math.inf
        self._cause_known = False
        self._left = False
        self._wanted = Rung.RUN

    def end(self, now: float, *, failed: bool, consequence: bool, left: bool = False) -> None:
        """Records that a rank's command ended.

        Args:
            now: time in seconds, from any origin.
            failed: the command failed.
            consequence: it failed only because another rank had failed.
            left: it exited with code 0 but without `shutdown`. Ranks that fail because of that report it, and the
                rank's process waits for DISMISS.
        """
        self._running -= 1
        self._left = self._left or left
        self._cause_known = self._cause_known or left or (failed and not consequence)
        if self.rung == Rung.RUN and (failed or not self._running):
            self.rung = Rung.LISTEN if failed or self._left else Rung.RUN
            self._since = now

    def end_job(self, now: float) -> None:
        """Records that the job cannot succeed, though no rank has failed."""
        if self.rung == Rung.RUN:
            self.rung, self._since, self._cause_known = Rung.LISTEN, now, True

    def ask(self) -> None:
        """Records that the user wants the job to end; a second request ends it at once."""
        self._wanted = Rung.ASK if max(self.rung, self._wanted) < Rung.ASK else Rung.DISMISS

    def due(self) -> float:
        """Returns the time of the next step."""
        if self._wanted > self.rung:
            return -math.inf
        return self._since + self._patience()

    def climb(self, now: float) -> Rung:
        """Takes the next step and returns it."""
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
