"""The stall inspector of a rank: queries the coordinator about stalled operations, and warns if it does not answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

from coordd.config import Config
from coordd.daemon.peer_to_peer import Letter
from coordd.monitoring.stacks import is_stopped, process_state
from coordd.negotiation.stall import StallWatch, tell
from coordd.negotiation.tensor_table import Entry, TensorTable, show_site
from coordd.ops.messages import Failure, Message, Overdue, StallReport, Waiting

__all__ = ["Delay", "Lookout"]

log = logging.getLogger("coordd")

_ANSWER_SECONDS = 2.0
_SHOWN = 6

Delay = tuple[float, Waiting]
"""Since when an operation waits, and which ranks are missing."""


class Lookout:
    """Watches this rank's own operations for stalls."""

    def __init__(
        self,
        config: Config,
        table: TensorTable,
        elsewhere: Callable[[], list[Delay]],
        *,
        ask: Callable[[Callable[[], Message]], None],
        give_up: Callable[[Failure], None] = lambda _: None,
    ) -> None:
        """Starts watching.

        Args:
            config: the settings of the stall check: whether it is on, and its limits in seconds.
            table: the negotiated operations.
            elsewhere: the operations that the coordinator does not know of, and since when they wait: matched and
                locked ones.
            ask: sends the message that its argument creates to the coordinator.
            give_up: ends the job in place of a coordinator that does not answer.
        """
        limit = config.stall_seconds if config.stall_check else math.inf
        self._active = config.stall_check or config.stall_abort_seconds > 0
        self._reports = config.stall_check
        self._watch = StallWatch(limit, abort_seconds=config.stall_abort_seconds)
        self._table = table
        self._elsewhere = elsewhere
        self._ask = ask
        self._give_up = give_up
        self._answer_due: float | None = None
        self._abort_due: float | None = None
        self.due = 0.0 if self._active else math.inf
        """When to call `look` next, in seconds of `time.monotonic`."""
        self._active_at = time.monotonic()
        self._asked_about: float | None = None
        self.coordinator = (0, "", "")
        """Process id and host of rank 0, and this host."""
        self.superiors: Mapping[int, int] = {}
        """The ranks between this one and the coordinator, rank 0 last, with their process ids; 0 on other hosts."""

    def observe(self, entry: Entry, now: float) -> None:
        """Learns normal waiting times from an operation that has ended."""
        self._watch.observe(entry, now)

    def note(self, items: Iterable[object]) -> None:
        """Records queued items of framework threads; a status query does not count as activity of this rank."""
        if any(isinstance(item, Entry | Letter) for item in items):
            self._active_at = time.monotonic()

    def idle(self) -> float:
        """Seconds since this rank last submitted, sent or received something."""
        return time.monotonic() - self._active_at

    def answer(self, report: StallReport) -> None:
        """Prints the coordinator's report."""
        self._answer_due = self._abort_due = None
        if report.waiting and self._reports:
            sites = {entry.request.name: show_site(entry.site) for entry in self._table if entry.site is not None}
            log.warning("%s", tell(report, sites))

    def look(self, now: float) -> None:
        """Queries the coordinator about overdue operations; cheap, because most calls return at once."""
        if now < self.due:
            return
        self.due = now + min(0.1, self._watch.limit / 8)
        oldest = self._oldest()
        if oldest is None:
            self._answer_due = self._abort_due = None
            return
        waited = now - oldest
        self._note_oldest(oldest)
        if self._answer_due is not None and now > self._answer_due:
            self._answer_due = None
            if self._reports:
                self._report_silence(waited)
        if self._watch.overdue(waited):
            self._answer_due = self._answer_due or now + _ANSWER_SECONDS
            if self._watch.intolerable(waited):
                self._abort_due = self._abort_due or now + _ANSWER_SECONDS
            self._ask(lambda: self._overdue(now, oldest))
        if self._abort_due is not None and self.superiors:
            self._abort(waited, late=now > self._abort_due)

    def _note_oldest(self, oldest: float) -> None:
        """Queries a new oldest operation as soon as it is late; others may end while the same one keeps waiting."""
        if oldest != self._asked_about:
            self._asked_about = oldest
            self._watch.begin_anew()

    def remaining(self, now: float) -> float | None:
        """Seconds until `look` may have something to do; None if no operation waits."""
        oldest = self._oldest() if self._active else None
        if oldest is None:
            return None
        seconds = self._watch.remaining(now - oldest)
        for due in (self._answer_due, self._abort_due):
            seconds = seconds if due is None else min(seconds, due - now)
        return max(seconds, self.due - now)

    def _oldest(self) -> float | None:
        """Since when the oldest operation waits; None if there is none."""
        times = [since for since, _ in self._elsewhere()]
        if (oldest := self._watch.oldest(self._table)) is not None:
            times.append(oldest)
        return min(times, default=None)

    def _overdue(self, now: float, oldest: float) -> Overdue:
        limit = now - self._watch.limit
        matched = tuple(waiting for since, waiting in self._elsewhere() if since <= limit)
        known = {waiting.name for waiting in matched}
        names = tuple(name for name in self._watch.late(self._table, now) if name not in known)
        return Overdue(now - oldest, names, matched)

    def _abort(self, waited: float, *, late: bool) -> None:
        """Ends the job in place of a coordinator that should have, if it is late or cannot answer."""
        stopped = [rank for rank, pid in self.superiors.items() if pid and is_stopped(pid)]
        if not (late or stopped):
            return
        self._abort_due = None
        culprit = stopped[0] if stopped else 0
        state = "its process is stopped, by SIGSTOP, SIGTSTP or a debugger" if stopped else "it is the coordinator"
        names = ", ".join(repr(entry.request.name) for entry in list(self._table)[:3]) or "a send or receive"
        text = f"does not answer, and kept {names} waiting for {waited:.0f} s (stall_abort_seconds): {state}"
        self._give_up(Failure(culprit, text))

    def _report_silence(self, waited: float) -> None:
        """Warns with the facts that this rank knows without the coordinator."""
        pid, host, here = self.coordinator
        state = process_state(pid, host, here)
        seen = f"; the operating system sees it as {state}" if state else ""
        names = [repr(entry.request.name) for entry in self._table]
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        log.warning(
            "no progress for %.1f s: waiting for %s, and rank 0, the coordinator (pid %d on %s), does not answer%s",
            waited,
            shown or "a send or receive",
            pid,
            host,
            seen,
        )
