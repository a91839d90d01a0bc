"""What has been found out of a job: what its ranks tell, and what the operating system says of those that do not."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from coordd.survey.standing import Stack, Standing

__all__ = ["Life", "Sighting", "Survey"]


class Life(StrEnum):
    """How a process is, as far as that can be seen from outside."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked in the kernel"
    STOPPED = "stopped"
    TRACED = "stopped by a debugger"
    DEAD = "dead"
    UNKNOWN = ""

    @property
    def can_answer(self) -> bool:
        """Whether it makes sense to ask."""
        return self not in {Life.STOPPED, Life.TRACED, Life.DEAD}


class Sighting(msgspec.Struct, frozen=True):
    """One rank.

    ``cores`` is how many it has used while it was asked, -1 if that is not known. Without a ``standing``, ``reason``
    says why there is none, and ``stacks`` are what could be seen from outside.
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
    """All ranks of a job, ascending, as seen from ``host``; ``unasked`` ranks of other hosts are left out."""

    job: str
    command: str
    host: str
    size: int
    sightings: tuple[Sighting, ...]
    unasked: int = 0
