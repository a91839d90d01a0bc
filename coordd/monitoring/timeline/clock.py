"""Measures the offset of this process's clock from rank 0's by round trips over the control channel. Pure.

Processes of one host read the same clock. A rank of another host asks its parent in the tree, which answers in rank 0's
time; so each rank is only asked by its neighbours. The offset refers to the middle of a round trip. Of several round
trips the shortest counts, because half of it bounds the error.
"""

from __future__ import annotations

from typing import NamedTuple

from coordd.ops.messages import Ping, Pong

__all__ = ["Clock", "Reading"]

_ROUND = 8
_PERIOD = 60.0
_PATIENCE = 1.0


class Reading(NamedTuple):
    """One measurement: at local time ``at``, rank 0's time is ``at + offset``, with an error of at most ``doubt``.

    All three are in seconds.
    """

    at: float
    offset: float
    doubt: float


class Clock:
    """The offset of one rank's clock from rank 0's."""

    def __init__(self, *, shared: bool) -> None:
        """Starts without a reading, unless the clock is shared with rank 0.

        Args:
            shared: whether this process and rank 0 read the same clock.
        """
        self._shared = shared
        self.reading = Reading(0.0, 0.0, 0.0) if shared else None
        """The latest reading; None before the first."""
        self._asked: float | None = None
        self._due = 0.0
        self._round: list[Reading] = []

    @property
    def deadline(self) -> float | None:
        """Time at which `turn` must be called; None for never."""
        return None if self._shared else self._due

    def turn(self, now: float) -> Ping | None:
        """Returns the request to send now, if one is due; it is repeated if no answer arrives."""
        if self._shared or now < self._due:
            return None
        self._asked, self._due = now, now + _PATIENCE
        return Ping(now)

    def answer(self, ping: Ping, now: float) -> Pong | None:
        """Returns the answer to a child's request, or None while this rank has no reading itself."""
        return None if self.reading is None else Pong(ping.sent, now + self.reading.offset)

    def hear(self, pong: Pong, now: float) -> Reading | None:
        """Processes an answer; returns the best reading once a round of ``_ROUND`` answers is complete."""
        if pong.sent != self._asked:
            return None  # the answer to an earlier request, which was repeated
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
