"""The coordinator of the simulated job, with checks on its input and output."""

from __future__ import annotations

from coordd.negotiation.channel import Lost
from coordd.negotiation.coordinator import Coordinator, Outgoing
from coordd.ops.messages import Blocked, Goodbye, Message, Plan, Refused, Report, StallReport
from coordd_tools.sim.caches import Caches, mentioned
from coordd_tools.sim.ledger import Ledger, demand
from coordd_tools.sim.setting import Settings
from coordd_tools.sim.trace import Trace

__all__ = ["Hub"]


class Hub(Coordinator):
    """The real `Coordinator`, with checks."""

    def __init__(self, settings: Settings, trace: Trace, ledger: Ledger, caches: Caches) -> None:
        super().__init__(
            settings.size,
            cache_capacity=settings.cache_capacity,
            fusion_bytes=settings.fusion_bytes,
            lock_steps=settings.lock_steps,
            abort_seconds=settings.abort_seconds,
            voices=None if settings.is_star else [(1 << settings.size) - 1],
        )
        self.plans = 0
        self.heard = 0
        self.locks = 0
        self._lock: tuple[int, frozenset[str]] = (0, frozenset())
        self._trace = trace
        self._ledger = ledger
        self._caches = caches
        self._is_star = settings.is_star

    def hear(self, voice: int, message: Message | Lost, *, now: float) -> None:
        """Receives a message."""
        if isinstance(message, Report):
            self._watch(voice, message)
            if self._is_star:
                self._ledger.hear(voice)
        self.heard += isinstance(message, Report | Goodbye | Refused | Blocked)
        if isinstance(message, Blocked) and not message.name:
            self._ledger.waits.heard(self._speakers(voice, message.ranks))
        super().hear(voice, message, now=now)

    def turn(self, now: float) -> Outgoing:
        """Returns the messages to send."""
        out = super().turn(now)
        for voice, message in out:
            if voice:
                continue
            self._trace.note("coordinator", message)
            if isinstance(message, Plan):
                self.plans += 1
                self._caches.record(self, message.sequence)
                self._note_lock(message)
                self._ledger.judge(message)
            if isinstance(message, StallReport):
                self._ledger.stalled(message, exact=self._is_star)
        demand(self.plans <= self.heard, f"{self.plans} plans after {self.heard} reports: plans come from nothing")
        return out

    def _note_lock(self, plan: Plan) -> None:
        if plan.unlock and plan.unlock == self._lock[0]:
            self._lock = (0, frozenset())
        if plan.lock:
            self._lock = (plan.sequence, self._caches.names(plan.sequence, plan.lock))
            self._ledger.lock(*self._lock)
            self.locks += 1

    def _watch(self, voice: int, report: Report) -> None:
        """Checks that a reporter that knows of a lock announces none of its tensors before breaking it."""
        number, names = self._lock
        if report.unlock == number:
            self._lock = (0, frozenset())
        elif report.seen >= number:
            told = mentioned(self, report) & names
            demand(not told, f"voice {voice} announces {told}, which are locked, in {report}")
