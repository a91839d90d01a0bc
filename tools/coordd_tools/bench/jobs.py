"""Jobs: one frozen dataclass for each benchmark, written by the parent and read by its ranks.

This module imports only the standard library: ``startup`` times imports, so its ranks must not have made them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "SET_SIZES",
    "SIZES",
    "AllreduceJob",
    "IdleJob",
    "Job",
    "MemoryJob",
    "PipelineJob",
    "SetsJob",
    "StartupJob",
    "StepJob",
    "TfJob",
    "dumps",
    "loads",
]

SIZES = (4, *(1 << shift for shift in range(12, 27, 2)))
"""Bytes of the tensors that ``allreduce`` reduces: 4 B, then 4 KiB to 64 MiB."""
SET_SIZES = (4, 4 << 20)
"""Bytes of the tensors that ``sets`` reduces: one for the call rate, one for the bandwidth."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Common fields of all benchmarks.

    Attributes:
        engines: names of the engines to measure.
        rounds: number of blocks of each engine.
        seed: of the weights and the batches.
    """

    noun: ClassVar[str]
    engines: tuple[str, ...]
    rounds: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class StepJob(_Job):
    """Training steps of whole models; ``steps`` in a block, 0 for each model's default."""

    noun: ClassVar[str] = "step"
    models: tuple[str, ...]
    steps: int = 0

    def groups(self) -> Sequence[StepJob]:
        """Returns the jobs of the process groups to start: all models and engines share one group."""
        return [self]


@dataclass(frozen=True, kw_only=True)
class TfJob(StepJob):
    """Training steps of whole models in TensorFlow; ``steps`` in a block, 0 for each model's default."""

    noun: ClassVar[str] = "tf"


@dataclass(frozen=True, kw_only=True)
class AllreduceJob(_Job):
    """In-place sums of one fp32 tensor of each size in bytes; ``calls`` in a block, 0 for each size's default."""

    noun: ClassVar[str] = "allreduce"
    sizes: tuple[int, ...] = SIZES
    calls: int = 0

    def groups(self) -> Sequence[AllreduceJob]:
        """Returns the jobs of the process groups to start: all sizes and engines share one group."""
        return [self]


@dataclass(frozen=True, kw_only=True)
class IdleJob(_Job):
    """Processes that initialize and then do nothing for ``seconds``."""

    noun: ClassVar[str] = "idle"
    seconds: float

    def groups(self) -> Sequence[IdleJob]:
        """Returns the jobs of the process groups to start: one engine each, because CPU time is counted per process."""
        return [dataclasses.replace(self, engines=(name,), rounds=1) for name in self.engines * self.rounds]


@dataclass(frozen=True, kw_only=True)
class StartupJob(_Job):
    """Time from a fresh interpreter to an initialized engine."""

    noun: ClassVar[str] = "startup"

    def groups(self) -> Sequence[StartupJob]:
        """Returns the jobs of the process groups to start: one engine each, because a process starts once."""
        return [dataclasses.replace(self, engines=(name,), rounds=1) for name in self.engines * self.rounds]


@dataclass(frozen=True, kw_only=True)
class SetsJob(_Job):
    """Sums in one half of the ranks, for each state (engine) of the other half; ``calls`` per block, 0 for defaults."""

    noun: ClassVar[str] = "sets"
    sizes: tuple[int, ...] = SET_SIZES
    calls: int = 0

    def groups(self) -> Sequence[SetsJob]:
        """Returns the jobs of the process groups to start: all sizes and states share one group."""
        return [self]


@dataclass(frozen=True, kw_only=True)
class MemoryJob(_Job):
    """Processes that train one model with one engine while their memory is sampled."""

    noun: ClassVar[str] = "memory"
    models: tuple[str, ...]

    def groups(self) -> Sequence[MemoryJob]:
        """Returns the jobs of the process groups to start: one engine and model each, as memory is per process."""
        return [
            dataclasses.replace(self, engines=(engine,), models=(model,), rounds=1)
            for model in self.models
            for engine in self.engines * self.rounds
        ]


@dataclass(frozen=True, kw_only=True)
class PipelineJob(_Job):
    """Training steps of the GPT in stages.

    Attributes:
        microbatches: number of microbatches of a batch.
        steps: of a block.
        watched: whether memory is measured, not time.
    """

    noun: ClassVar[str] = "pipeline"
    microbatches: int = 8
    steps: int = 2
    watched: bool = False

    def groups(self) -> Sequence[PipelineJob]:
        """Returns the jobs of the process groups to start: one for all times, and one for each engine's memory."""
        return [
            self,
            *(dataclasses.replace(self, engines=(name,), rounds=1, watched=True) for name in self.engines),
        ]


Job = StepJob | TfJob | AllreduceJob | IdleJob | StartupJob | MemoryJob | SetsJob | PipelineJob


_KINDS: dict[str, Callable[..., Job]] = {
    kind.noun: kind for kind in (StepJob, TfJob, AllreduceJob, IdleJob, StartupJob, MemoryJob, SetsJob, PipelineJob)
}


def dumps(job: Job) -> str:
    """Serializes a job for its ranks."""
    return json.dumps({"noun": job.noun, **dataclasses.asdict(job)})


def loads(text: str) -> Job:
    """Deserializes the output of ``dumps``."""
    fields: dict[str, Any] = json.loads(text)
    kind = _KINDS[fields.pop("noun")]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
