"""The user's choices on how a model is split and trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from coordd.errors import ArgumentError
from coordd.ops.checks import whole
from coordd.pipeline.microbatch import fitting
from coordd.pipeline.partition import By
from coordd.pipeline.schedules.registry import Choice, find
from coordd.pipeline.units import in_bytes

__all__ = ["LossReduction", "PipelineConfig", "Reuse"]

Compression = Literal["bf16", "int8"]
LossReduction = Literal["mean", "sum", "microbatch"]

Reuse = Sequence[str] | Mapping[str, Sequence[str]]
"""Modules that are copied to each stage that calls them; by key, if modules of several names share parameters."""


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is split, and in which order it is computed.

    Attributes:
        layers_per_proc: number of layers of each stage; ``"auto"`` splits evenly by `split`.
        microbatches: number of microbatches that each replica's part of a batch is cut into.
        schedule: ``gpipe``, ``1f1b``, ``1f1b-eager``, ``interleaved``, ``zb-h1``, ``zb-h2``, ``zb-lean``,
            ``zb-h2-lean``, ``zb-v``, ``pipedream`` or ``2bw``.
        data_parallel: number of replicas of the pipeline; or of each stage, as in ``[2, 1]``.
        chunks: number of stages per rank, if the schedule leaves a choice.
        split: the quantity to balance: ``"parameters"``, ``"layers"``, or a quantity measured on one microbatch of the
            example: ``"time"``, or ``"memory"`` with all that a stage holds in training.
        memory_cap: the most memory that a rank may hold, in bytes or as in ``"2GiB"``; it is measured, too. None for no
            limit.
        reuse: modules that are copied to each stage that calls them; the copies are kept equal. Under a key, as in
            ``{"embedding": ["embed", "head"]}``, several modules get the parameters of the first, as if the model had
            tied them.
        cuts: names of the only modules at which a stage may begin; modules that contain none of them are called as a
            whole.
        recompute: whether activations are recomputed for the backward pass instead of being kept.
        offload: whether activations, until their backward pass, and the state of optimizers, between steps, are kept in
            the host's memory. On the CPU they are there anyway.
        compression: format of activations and gradients between stages: None for unchanged, ``"bf16"`` or ``"int8"``.
            Tensors without gradient, such as masks and indices, are sent unchanged.
        clip_norm: the largest norm of all gradients together; None for no limit.
        loss_reduction: how the loss reduces rows: ``"mean"``, weighted by `weight` if given, or ``"sum"``. It is
            checked in training; None stands for a mean, with a warning if it cannot be checked. ``"microbatch"`` trains
            the mean of the losses of microbatches, whatever they are, without a check.
        seed: makes dropout depend on step, stage and microbatch only.
    """

    layers_per_proc: Sequence[int] | Literal["auto"] = "auto"
    microbatches: int = 8
    schedule: str = "1f1b"
    data_parallel: int | Sequence[int] = 1
    chunks: int | None = None
    split: By = "parameters"
    memory_cap: float | str | None = None
    reuse: Reuse = ()
    cuts: Sequence[str] | None = None
    recompute: bool = False
    offload: bool = False
    compression: Compression | None = None
    clip_norm: float | None = None
    loss_reduction: LossReduction | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        find(self.schedule)
        replicas = [whole(each, "data_parallel") for each in self._each]
        if self.chunks is not None:
            whole(self.chunks, "chunks", least=1)
        microbatches = whole(self.microbatches, "microbatches")
        for name, least in (("microbatches", microbatches), ("data_parallel", min(replicas, default=0))):
            if least < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.clip_norm is not None:
            self.check_one_step("clip_norm")
            if not self.clip_norm > 0:
                raise ArgumentError(f"clip_norm is {self.clip_norm}, and must be more than 0, or None for no limit")
        self._check_known("split", get_args(By))
        self._check_known("compression", (None, *get_args(Compression)))
        self._check_known("loss_reduction", (None, *get_args(LossReduction)))
        if self.memory_cap is not None:
            in_bytes(self.memory_cap)

    def _check_known(self, name: str, known: Sequence[str | None]) -> None:
        if (given := getattr(self, name)) not in known:
            told = ", ".join(map(str, known))
            raise ArgumentError(f"{name}={given!r} is unknown; choose one of {told}")

    def check_one_step(self, wanted: str) -> None:
        """Raises if stages do not step together, as ``wanted`` requires.

        Raises:
            ArgumentError: each stage steps at a different time.
        """
        if self.schedule == "pipedream":
            raise ArgumentError(
                f"{wanted} looks at the gradients of all stages at a time, which never are those of one step under "
                "'pipedream': use another schedule, such as '2bw'"
            )

    @property
    def choice(self) -> Choice:
        """The schedule."""
        return find(self.schedule)

    @property
    def widest(self) -> int:
        """Number of replicas of the stage that has the most."""
        return max(self._each)

    @property
    def least(self) -> int:
        """The fewest rows that a batch can have."""
        return self.least_for(1)

    def least_for(self, microbatches: int) -> int:
        """Returns the fewest rows that make ``microbatches`` microbatches for each replica of the widest stage."""
        return self.widest * -(-microbatches // self._stride) * self._stride

    def fitting(self, rows: int) -> int:
        """Returns the number of microbatches, per replica of the widest stage, that ``rows`` rows are cut into.

        Raises:
            ArgumentError: there are too few rows.
        """
        return fitting(rows, self.microbatches, self.widest, stride=self._stride)

    @property
    def _stride(self) -> int:
        """The number of microbatches is a multiple of this, so that the replicas of each stage get equally many."""
        return math.lcm(*(each // math.gcd(each, self.widest) for each in self._each))

    @property
    def measured(self) -> bool:
        """Whether the layers must be measured."""
        return self.memory_cap is not None or (self.layers_per_proc == "auto" and self.split in {"time", "memory"})

    @property
    def _each(self) -> Sequence[int]:
        return [self.data_parallel] if isinstance(self.data_parallel, int) else self.data_parallel

    def ranks(self, world: int) -> int:
        """Returns the number of ranks of a pipeline in a world of this size.

        With a number of replicas for each stage, it is the number of stages.

        Raises:
            ArgumentError: the world does not divide into that many replicas.
        """
        if not isinstance(self.data_parallel, int):
            if sum(self._each) != world:
                raise ArgumentError(
                    f"data_parallel={list(self._each)} takes {sum(self._each)} ranks, and there are {world}: change "
                    "it, or start another number of ranks"
                )
            return len(self._each)
        if world % self.data_parallel:
            fewer = world - world % self.data_parallel
            fitting = [fewer, fewer + self.data_parallel] if fewer else [self.data_parallel]
            divisors = [str(each) for each in range(1, world + 1) if world % each == 0]
            raise ArgumentError(
                f"{world} ranks do not make {self.data_parallel} equal pipelines: start "
                f"{' or '.join(map(str, fitting))} ranks, or set data_parallel to {', '.join(divisors)}"
            )
        return world // self.data_parallel
