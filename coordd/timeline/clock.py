"""How far this process's clock is from rank 0's: asked over the control channel, by the middle of a round trip.

Pure. Processes of one host read the same clock. Others ask whom they report to, who answers in rank 0's time; so no
rank hears more than its neighbours. Of several round trips the shortest counts, for half of it bounds the error.
"""

from __future__ import annotations

from typing import NamedTuple

from coordd.messages import Ping, Pong

__all__ = ["Clock", "Reading"]

_ROUND = 8
_PERIOD = 60.0
_PATIENCE = 1.0


class Reading(NamedTuple):
    """At a time of this process: the seconds to add to get rank 0's time, and how far that may be off."""

    at: float
    offset: float
    doubt: float


class Clock:
    """One rank's knowledge of rank 0's time."""

    def __init__(self, *, shared: bool) -> None:
        """Starts without knowledge, unless rank 0 is on this host.

        Args:
            shared: whether this process and rank 0 read the same clock.
        """
        self._shared = shared
        self.reading = Reading(0.0, 0.0, 0.0) if shared else None
        """What is known by now."""
        self._asked: float | None = None
        self._due = 0.0
        self._round: list[Reading] = []

    @property
    def deadline(self) -> float | None:
        """When `turn` must be called; None for never."""
        return None if self._shared else self._due

    def turn(self, now: float) -> Ping | None:
        """Returns what to ask now, if anything; if nobody answers, it is asked again."""
        if self._shared or now < self._due:
            return None
        self._asked, self._due = now, now + _PATIENCE
        return Ping(now)

    def answer(self, ping: Ping, now: float) -> Pong | None:
        """Answers those below; not before this rank itself knows."""
        return None if self.reading is None else Pong(ping.sent, now + self.reading.offset)

    def hear(self, pong: Pong, now: float) -> Reading | None:
        """Takes an answer in; returns the best reading once there are enough."""
        if pong.sent != self._asked:
            return None  # it had been given up
        self._asked = None
        middle = (pong.sent + now) / 2
        self._round.append(Reading(middle, pong.now - middle, (now - pong.sent) / 2))
        self._due = now
        if len(self._round) < _ROUND:
            return None
        self.reading = min(self._round, key=lambda reading: reading.doubt)
        self._round.clear()
        self._due = now + _PERIOD
        return self.reading
