"""The coordinator of the simulated job, and a watch on what goes in and comes out."""

from __future__ import annotations

from coordd.control.protocol import Lost
from coordd.coordinator import Coordinator
from coordd.messages import Goodbye, Message, Plan, Report, StallReport
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.caches import Caches
from coordd_tools.sim.ledger import Ledger, demand
from coordd_tools.sim.trace import Trace

__all__ = ["Hub"]


class Hub:
    """Passes messages to the real `Coordinator`, and counts them."""

    def __init__(self, coordinator: Coordinator, agenda: Agenda, trace: Trace, ledger: Ledger, caches: Caches) -> None:
        self.coordinator = coordinator
        self.plans = 0
        self.heard = 0
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
            if isinstance(message, StallReport):
                self._ledger.stalled(message)
        demand(self.plans <= self.heard, f"{self.plans} plans after {self.heard} reports: plans come from nothing")
        return out
