"""How a model is to be split and trained: the user's choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coordd.errors import ArgumentError
from coordd.pipeline.catalogue import Choice, find

__all__ = ["PipelineConfig"]


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is split, and in which order it is computed.

    Attributes:
        layers_per_proc: how many layers each stage gets; ``"auto"`` splits evenly by `split`.
        microbatches: into how many each replica's part of a batch is cut.
        schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``zb-h1``, ``zb-v``, ``pipedream`` or ``2bw``.
        data_parallel: how many replicas of the pipeline there are.
        chunks: how many stages a rank has, where the schedule lets one choose.
        split: what is to be even: ``"parameters"`` or ``"layers"``.
        reuse: modules of which each stage that calls them gets a copy, kept equal.
        cuts: names of modules at which a stage may begin, for a model that cannot be traced.
        recompute: whether activations are computed anew for the backward pass, and not kept.
        offload: whether activations, until they are gone back through, and the state of optimizers, between steps, wait
            in the host's memory. On the CPU they are there anyway.
        compression: how activations and gradients travel between stages: None for as they are, ``"bf16"`` or
            ``"int8"``. What no gradient flows through, such as masks and indices, travels as it is.
        clip_norm: the largest norm of all gradients together; None for any.
        seed: makes dropout depend on step, stage and microbatch alone.
    """

    layers_per_proc: Sequence[int] | Literal["auto"] = "auto"
    microbatches: int = 8
    schedule: str = "1f1b"
    data_parallel: int = 1
    chunks: int | None = None
    split: Literal["parameters", "layers"] = "parameters"
    reuse: Sequence[str] = ()
    cuts: Sequence[str] | None = None
    recompute: bool = False
    offload: bool = False
    compression: Literal["bf16", "int8"] | None = None
    clip_norm: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        find(self.schedule)
        for name in ("microbatches", "data_parallel"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.clip_norm is not None:
            self.check_one_step("clip_norm")

    def check_one_step(self, wanted: str) -> None:
        """Raises if stages do not step together, as what is wanted needs.

        Raises:
            ArgumentError: each stage steps at moments of its own.
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

    def ranks(self, world: int) -> int:
        """How many ranks a pipeline has in a world of this size.

        Raises:
            ArgumentError: the world does not divide into so many replicas.
        """
        if world % self.data_parallel:
            fewer = world - world % self.data_parallel
            fitting = [fewer, fewer + self.data_parallel] if fewer else [self.data_parallel]
            divisors = [str(each) for each in range(1, world + 1) if world % each == 0]
            raise ArgumentError(
                f"{world} ranks do not make {self.data_parallel} equal pipelines: start "
                f"{' or '.join(map(str, fitting))} ranks, or set data_parallel to {', '.join(divisors)}"
            )
        return world // self.data_parallel
