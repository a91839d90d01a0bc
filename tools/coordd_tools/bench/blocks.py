"""Blocks: the raw readings, as each rank takes them and as the parent joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Block", "by_subject", "join"]


@dataclass(frozen=True)
class Block:
    """What one rank read while one engine ran a few calls in a row.

    Attributes:
        subject: what was run: a model, a size in bytes, a phase.
        engine: who ran it.
        seconds: wall time of each call.
        cpu_seconds: CPU time of the process, all its threads, over the whole block.
        switches: how often its threads went to sleep in that time.
        peak_bytes: the most memory that it had, where that was watched.
        allocated_bytes: the most that the C library had allocated at a time, where that was watched.
        gradient_bytes: what the model's gradients take, where there is a model.
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
        """How many calls were timed."""
        return len(self.seconds)

    def divided(self, parts: float) -> Block:
        """Returns the times of one part, where each call did so many."""
        return replace(
            self, seconds=tuple(second / parts for second in self.seconds), cpu_seconds=self.cpu_seconds / parts
        )

    @property
    def mean_seconds(self) -> float:
        """Wall time a call."""
        return sum(self.seconds) / self.calls


def join(by_rank: Sequence[Sequence[Block]]) -> list[tuple[Block, ...]]:
    """Puts the ranks' readings of the same block side by side.

    Raises:
        ValueError: the ranks did not run the same blocks in the same order; some may have had no calls in one.
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
