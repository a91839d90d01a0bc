"""The memory that a step adds on a rank, by the number of microbatches of the same size.

It is the peak memory during a step minus the memory before it: activations, messages in flight, and temporary memory of
passes. 1F1B keeps as many activations as stages follow, GPipe those of all microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordd_tools.stages.memory import RETURNED
from coordd_tools.stages.ranks import run

__all__ = ["MICROBATCHES", "SCHEDULES", "Row", "measure"]

MICROBATCHES = (8, 16, 32)
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Row:
    """One schedule with one number of microbatches.

    Attributes:
        schedule: its name.
        microbatches: the number of microbatches.
        peaks: by rank, the bytes that a step adds.
    """

    schedule: str
    microbatches: int
    peaks: tuple[int, ...]


def measure(ranks: int, schedules: Sequence[str], microbatches: Sequence[int]) -> Iterator[Row]:
    """Measures each schedule with each number of microbatches, each in processes of its own."""
    for schedule in schedules:
        for count in microbatches:
            peaks = run("growth", ranks, {"schedule": schedule, "microbatches": count}, variables=RETURNED)
            yield Row(schedule, count, tuple(peaks))
