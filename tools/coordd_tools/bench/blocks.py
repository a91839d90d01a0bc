"""Blocks: the raw readings of each rank, and how the parent combines them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Block", "by_subject", "join"]


@dataclass(frozen=True)
class Block:
    """Readings of one rank while one engine ran a few consecutive calls.

    Attributes:
        subject: the workload: a model, a size in bytes, a phase.
        engine: the engine that ran it.
        seconds: wall time of each call.
        cpu_seconds: CPU time of the process, all its threads, over the whole block.
        switches: number of times its threads went to sleep in that time.
        peak_bytes: peak memory of the process, where it was sampled.
        allocated_bytes: peak of the memory allocated by the C library, where it was sampled.
        gradient_bytes: size of the model's gradients, where there is a model.
    """

    subject: str
    engine: str
    seconds: tuple[float, ...]
    cpu_seconds: float = 0.0
    switches: int = 0
    peak_bytes: int = 0
    allocated_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def calls(self) -> int:
        """Number of timed calls."""
        return len(self.seconds)

    def divided(self, parts: float) -> Block:
        """Returns the times of one part, where each call consisted of several."""
        return replace(
            self, seconds=tuple(second / parts for second in self.seconds), cpu_seconds=self.cpu_seconds / parts
        )

    @property
    def mean_seconds(self) -> float:
        """Mean wall time of a call."""
        return sum(self.seconds) / self.calls


def join(by_rank: Sequence[Sequence[Block]]) -> list[tuple[Block, ...]]:
    """Groups the ranks' readings of the same block.

    Raises:
        ValueError: the ranks did not run the same blocks in the same order; a rank may have no calls in a block.
    """
    joined = list(zip(*by_rank, strict=True))
    for row in joined:
        runs = {(block.subject, block.engine) for block in row}
        calls = {block.calls for block in row if block.calls}
        if len(runs) > 1 or len(calls) > 1:
            raise ValueError(f"the ranks ran different blocks: {[(block.subject, block.engine) for block in row]}")
    return joined


def by_subject(
    joined: Iterable[tuple[Block, ...]], reading: Callable[[tuple[Block, ...]], Sequence[float]]
) -> dict[tuple[str, str], list[float]]:
    """Collects a reading of all rounds under ``(subject, engine)``, in the order of the rounds."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in joined:
        found.setdefault((row[0].subject, row[0].engine), []).extend(reading(row))
    return found
