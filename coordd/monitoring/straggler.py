"""Measures on a moving average how far a rank is ahead of the last one. Pure.

No clocks are compared: an allreduce ends on all ranks at about the same time, so the rank that waited least came last.
All ranks average over the same operations, so the difference of two averages is the average difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordd.negotiation.tensor_table import Entry
from coordd.ops.messages import Kind

__all__ = ["Lead", "behind"]

_WEIGHT = 1 / 32


class Lead:
    """How long this rank waits between its own part of an allreduce and the result."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The average over the latest few dozen buckets of the whole world."""
        self._seen = 0

    def observe(self, entries: Sequence[Entry], now: float) -> None:
        """Adds a bucket to the average, from the time of its last tensor; buckets of a process set do not count.

        Other ranks do not share the buckets of a process set. A joined rank waits for no rank, so its buckets do not
        count either.
        """
        last = entries[-1]
        if last.request.kind is Kind.ALLREDUCE and not last.request.members and not last.patient:
            self._seen += 1
            self.seconds += (now - last.handle.submitted - self.seconds) * max(_WEIGHT, 1 / self._seen)


def behind(leads: Mapping[int, float]) -> dict[int, float]:
    """Returns how many seconds after the first rank each rank arrives on average.

    Args:
        leads: `Lead.seconds` by rank; 0 where there is none yet.
    """
    known = {rank: seconds for rank, seconds in leads.items() if seconds > 0}
    first = max(known.values(), default=0.0)
    return {rank: first - seconds for rank, seconds in known.items()}
