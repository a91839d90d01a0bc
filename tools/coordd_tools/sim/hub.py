"""The coordinator of the simulated job, and a watch on what goes in and comes out."""

from __future__ import annotations

from coordd.control.protocol import Lost
from coordd.coordinator import Coordinator
from coordd.messages import Goodbye, Message, Plan, Report, StallReport
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.caches import Caches, mentioned
from coordd_tools.sim.ledger import Ledger, demand
from coordd_tools.sim.trace import Trace

__all__ = ["Hub"]


class Hub:
    """Passes messages to the real `Coordinator`, and counts them."""

    def __init__(self, coordinator: Coordinator, agenda: Agenda, trace: Trace, ledger: Ledger, caches: Caches) -> None:
        self.coordinator = coordinator
        self.plans = 0
        self.heard = 0
        self.locks = 0
        self._lock: tuple[int, frozenset[str]] = (0, frozenset())
        self._agenda = agenda
        self._trace = trace
        self._ledger = ledger
        self._caches = caches

    @property
    def deadline(self) -> float | None:
        """When `turn` must be called even if no message arrives."""
        return self.coordinator.deadline

    def hear(self, rank: int, message: Message | Lost) -> None:
        """Takes a message in."""
        if isinstance(message, Report):
            self._watch(rank, message)
            self._ledger.hear(rank)
        self.heard += isinstance(message, Report | Goodbye)
        self.coordinator.hear(rank, message, now=self._agenda.now)

    def turn(self) -> list[tuple[int, Message]]:
        """Returns what is to be sent."""
        out = self.coordinator.turn(self._agenda.now)
        for rank, message in out:
            if rank:
                continue
            self._trace.note("coordinator", message)
            if isinstance(message, Plan):
                self.plans += 1
                self._caches.record(self.coordinator, message.sequence)
                self._note_lock(message)
            if isinstance(message, StallReport):
                self._ledger.stalled(message)
        demand(self.plans <= self.heard, f"{self.plans} plans after {self.heard} reports: plans come from nothing")
        return out

    def _note_lock(self, plan: Plan) -> None:
        if plan.unlock and plan.unlock == self._lock[0]:
            self._lock = (0, frozenset())
        if plan.lock:
            self._lock = (plan.sequence, self._caches.names(plan.sequence, plan.lock))
            self._ledger.lock(*self._lock)
            self.locks += 1

    def _watch(self, rank: int, report: Report) -> None:
        """Who knows of a lock speaks of what is in it only after he has broken it."""
        number, names = self._lock
        if report.unlock == number:
            self._lock = (0, frozenset())
        elif report.seen >= number:
            told = mentioned(self.coordinator, report) & names
            demand(not told, f"rank {rank} announces {told}, which are locked, in {report}")
