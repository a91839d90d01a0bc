"""Decides when a wait is too long, and formats the stall report. Pure: time is passed in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coordd.errors import spans
from coordd.negotiation.tensor_table import Entry, TensorTable
from coordd.ops.messages import StallReport, Waiting

__all__ = ["StallWatch", "tell"]

_LEAST, _MOST, _TIMES = 5.0, 60.0, 20.0
_MEMORY = 0.9
_SHOWN = 6
_PLACES = 3


class StallWatch:
    """Decides when this rank queries what the other ranks are doing.

    Without a fixed limit it adapts: twenty times the usual wait, between 5 and 60 seconds. A wait that continues is
    queried again after twice the time, and so on; and after ``abort_seconds``, which end the job, unless 0.
    """

    def __init__(self, seconds: float | None, *, abort_seconds: float = 0.0) -> None:
        self._fixed = seconds
        self._abort = abort_seconds or math.inf
        self._usual = 0.0
        self._next: float | None = None
        self._stirred = 0.0

    @property
    def limit(self) -> float:
        """Seconds after which a wait is too long."""
        usual = min(_MOST, max(_LEAST, _TIMES * self._usual))
        return min(usual if self._fixed is None else self._fixed, self._abort)

    def intolerable(self, waited: float) -> bool:
        """Returns whether a wait is long enough to end the job."""
        return waited >= self._abort

    def observe(self, entry: Entry, now: float) -> None:
        """Learns from an operation that ended; where this rank has joined, only that the other ranks make progress."""
        if entry.patient:
            self._stirred = now
        else:
            self._usual = _MEMORY * self._usual + (1 - _MEMORY) * (now - entry.handle.submitted)

    def oldest(self, table: TensorTable) -> float | None:
        """Since when the oldest operation waits; None if there is none."""
        return min(map(self._since, table.oldest()), default=None)

    def late(self, table: TensorTable, now: float) -> list[str]:
        """Returns the names of operations that have waited for too long."""
        return [entry.request.name for entry in table if self._since(entry) <= now - self.limit]

    def begin_anew(self) -> None:
        """Restarts the schedule of queries: another operation is now the oldest."""
        self._next = None

    def overdue(self, waited: float) -> bool:
        """Returns whether it is time to query, given how long the oldest operation has waited."""
        if waited < self.limit:
            self._next = None  # the operation of the last query has ended
            return False
        if self._next is not None and waited < self._next:
            return False
        self._next = 2 * waited if waited >= self._abort else min(2 * waited, self._abort)
        return True

    def remaining(self, waited: float) -> float:
        """Seconds until `overdue` can return True."""
        due = self.limit if self._next is None or waited < self.limit else self._next
        return max(0.0, due - waited)

    def _since(self, entry: Entry) -> float:
        """Since when an operation waits; a join starts over whenever the other ranks complete an operation."""
        submitted = entry.handle.submitted
        return max(submitted, self._stirred) if entry.patient else submitted


def tell(report: StallReport, sites: Mapping[str, str] | None = None) -> str:
    """Formats a stall report for the user.

    Args:
        report: the coordinator's answer.
        sites: the lines of code on which this rank submitted the operations that it knows, by name.
    """
    who = ", waiting for remainder of ranks" if any(waiting.missing for waiting in report.waiting) else ""
    lines = [f"no progress for {report.seconds:.1f} s{who}:"]
    by_missing: dict[tuple[int, ...], list[Waiting]] = {}
    for waiting in report.waiting:
        by_missing.setdefault(waiting.missing, []).append(waiting)
    lines += [
        f"  {_names(group)} {_wait(missing)}{_where(group, sites or {})}" for missing, group in by_missing.items()
    ]
    for account in report.accounts:
        lines.append(f"  rank {account.rank} has last submitted {account.last}; its main thread is at")
        lines += [f"    {line}" for line in account.stack.rstrip().splitlines()]
    if report.silent:
        text = "does not answer" if len(report.silent) == 1 else "do not answer"
        lines.append(f"  {_rank_words(report.silent)} {text}: the process is stopped, dead, or holds Python's lock")
    return "\n".join(lines)


def _names(group: Sequence[Waiting]) -> str:
    shown = ", ".join(f"{waiting.name!r} ({waiting.operation})" for waiting in group[:_SHOWN])
    rest = len(group) - _SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _wait(missing: Sequence[int]) -> str:
    return f"waiting for {_rank_words(missing)}" if missing else "agreed by all ranks, data still on the way"


def _where(group: Sequence[Waiting], sites: Mapping[str, str]) -> str:
    places = list(dict.fromkeys(sites[waiting.name] for waiting in group if waiting.name in sites))
    rest = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
    return f"; submitted here at {', '.join(places[:_PLACES])}{rest}" if places else ""


def _rank_words(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"
