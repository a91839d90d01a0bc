"""How far a rank is ahead of the last one, on a moving average. Pure.

No clocks are compared: an allreduce ends on all ranks at about the same time, so who has waited least came last. All
ranks average over the same operations, so the difference of two averages is the average difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordd.messages import Kind
from coordd.table import Entry

__all__ = ["Lead", "behind"]

_WEIGHT = 1 / 32


class Lead:
    """How long this rank waits between its own part of an allreduce and the result."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The average over the latest few dozen buckets of the whole world."""
        self._seen = 0

    def observe(self, entries: Sequence[Entry], now: float) -> None:
        """Counts a bucket in, from when its last tensor was there; not that of a set, which others do not share.

        Who has joined waits for nobody, so that is left out, too.
        """
        last = entries[-1]
        if last.request.kind is Kind.ALLREDUCE and not last.request.members and not last.patient:
            self._seen += 1
            self.seconds += (now - last.handle.submitted - self.seconds) * max(_WEIGHT, 1 / self._seen)


def behind(leads: Mapping[int, float]) -> dict[int, float]:
    """Says how many seconds after the first rank each rank comes as a rule.

    Args:
        leads: `Lead.seconds` by rank; 0 where there is none yet.
    """
    known = {rank: seconds for rank, seconds in leads.items() if seconds > 0}
    first = max(known.values(), default=0.0)
    return {rank: first - seconds for rank, seconds in known.items()}
