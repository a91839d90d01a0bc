"""The result of probing a job: the answers of its ranks, and the process state of ranks that do not answer."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from coordd.monitoring.status.report import Stack, Standing

__all__ = ["Life", "Sighting", "Survey"]


class Life(StrEnum):
    """State of a process, as seen from outside."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked in the kernel"
    STOPPED = "stopped"
    TRACED = "stopped by a debugger"
    DEAD = "dead"
    UNKNOWN = ""

    @property
    def can_answer(self) -> bool:
        """Whether a process in this state can answer a query."""
        return self not in {Life.STOPPED, Life.TRACED, Life.DEAD}


class Sighting(msgspec.Struct, frozen=True):
    """The probe result of one rank.

    ``cores`` is the number of cores that the process used during the query, -1 if unknown. Without a ``standing``,
    ``reason`` explains why, and ``stacks`` are the stacks read from outside.
    """

    rank: int
    host: str = ""
    pid: int = 0
    life: Life = Life.UNKNOWN
    cores: float = -1.0
    standing: Standing | None = None
    reason: str = ""
    stacks: tuple[Stack, ...] = ()


class Survey(msgspec.Struct, frozen=True):
    """The probe results of a job's ranks, ascending, seen from ``host``; ``unasked`` other ranks are left out."""

    job: str
    command: str
    host: str
    size: int
    sightings: tuple[Sighting, ...]
    unasked: int = 0
