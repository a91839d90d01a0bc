"""Reads operations and waits from one rank's events. Times are in seconds of rank 0's clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from coordd.monitoring.timeline.events import PHASES, WAIT, Event

__all__ = ["Journal", "Operation", "Wait"]

_FIRST, _LAST = PHASES[0], PHASES[-1]


class Operation(NamedTuple):
    """One operation on one rank; ``key`` is the same on all ranks, and for a send and its receive.

    The times are, in order: ``come``, when all its tensors had been submitted on this rank; ``queued``, when it was
    negotiated or this rank had voted; ``moving``, when the transfer began; ``landed``, when the results were complete.
    """

    key: str
    kind: str
    names: tuple[str, ...]
    nbytes: int
    come: float
    queued: float
    moving: float
    landed: float


class Wait(NamedTuple):
    """A wait for an operation."""

    since: float
    until: float


class _Draft:
    """An operation whose events are still being read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.phases: dict[str, Event] = {}
        self.come = 0.0
        self.nbytes = 0
        self.tensors = 0

    def add(self, event: Event, name: str) -> Operation | None:
        """Adds one phase event; returns the operation if the event was its last."""
        self.phases[event.name] = event
        if event.name == _FIRST:
            self.names.append(name)
            self.come = max(self.come, event.ts)
        self.nbytes += event.args.get("bytes", 0)
        self.tensors += event.name == _LAST
        return self._operation() if self.tensors == event.args.get("of") else None

    def _operation(self) -> Operation | None:
        kind = next((name for name in self.phases if name not in PHASES), None)
        if kind is None or len(self.phases) <= len(PHASES):
            return None  # the beginning of the operation is missing
        queued, moving, last = (self.phases[name] for name in (PHASES[1], kind, _LAST))
        names = tuple(self.names)
        landed = last.ts + (last.dur or 0.0)
        times = (stamp / 1e6 for stamp in (self.come, queued.ts, moving.ts, landed))
        return Operation(self.key(moving), kind, names, self.nbytes, *times)

    @staticmethod
    def key(event: Event) -> str:
        return str(event.args["op"])


class Journal:
    """One rank's operations, sorted by ``come``, and its main thread's waits."""

    def __init__(self, rank: int, events: Iterable[Event]) -> None:
        """Reads the events of one rank."""
        self.rank = rank
        self.operations: list[Operation] = []
        rows: dict[int, str] = {}
        drafts: defaultdict[str, _Draft] = defaultdict(_Draft)
        waits: defaultdict[int, list[Wait]] = defaultdict(list)
        for event in events:
            if event.name == "thread_name":
                rows[event.tid] = str(event.args["name"])
            elif event.name == WAIT:
                waits[event.tid].append(_wait(event))
            elif "peer" in event.args:
                self.operations.append(_matched(event, rows.get(event.tid, "")))
            elif "op" in event.args:
                key = _Draft.key(event)
                operation = drafts[key].add(event, rows.get(event.tid, ""))
                if operation is not None:
                    del drafts[key]
                    self.operations.append(operation)
        self.operations.sort(key=lambda operation: operation.come)
        often = max(waits.values(), key=len, default=[])
        self.waits = sorted(often)
        """Waits of the thread that waited most often, sorted."""


def _matched(event: Event, name: str) -> Operation:
    """Returns the operation of a send or receive, which is not negotiated."""
    since, until = _wait(event)
    return Operation(_Draft.key(event), event.name, (name,), int(event.args["bytes"]), since, since, since, until)


def _wait(event: Event) -> Wait:
    return Wait(event.ts / 1e6, (event.ts + (event.dur or 0.0)) / 1e6)
