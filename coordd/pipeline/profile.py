"""Costs of a model's layers, their best split, and the costs of the resulting stages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from coordd.errors import ArgumentError
from coordd.pipeline.load import Load, Memory, Share, shares
from coordd.pipeline.partition import By, regroup, split
from coordd.pipeline.simulate import Costs
from coordd.pipeline.units import Units

__all__ = ["Border", "Profile"]


@dataclass(frozen=True)
class Border:
    """Costs of a cut between two layers, for one microbatch.

    Attributes:
        seconds: time that either side of it needs to pack and unpack values and gradients.
        volume: bytes that cross it, in each direction.
        kept: bytes of them that the stage behind it keeps and that none of its layers counts as an activation.
    """

    seconds: float = 0.0
    volume: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Profile:
    """The layers of a model, with their costs for one microbatch.

    Attributes:
        names: of the layers.
        loads: of the layers.
        groups: runs of layers that no cut divides.
        borders: of the cuts between layers, one fewer than layers; empty if the costs of cuts are unknown.
    """

    names: tuple[str, ...]
    loads: tuple[Load, ...]
    groups: tuple[range, ...]
    borders: tuple[Border, ...] = ()

    def split(self, stages: int, *, by: By = "time", memory: Memory | None = None) -> tuple[range, ...]:
        """Splits as evenly as possible; returns for each stage its layers.

        Args:
            stages: number of stages.
            by: the quantity to balance, see `coordd.pipeline.partition.split`.
            memory: what stages hold, and the most they may hold.

        Raises:
            ArgumentError: there are too few layers, or they do not fit into the memory.
        """
        items = [Load.total(self.loads[group.start : group.stop]) for group in self.groups]
        between = [self.borders[group.start - 1] for group in self.groups[1:]] if self.borders else []
        cuts = [border.seconds for border in between]
        found = split(items, stages, by=by, cuts=cuts, memory=_informed(memory, between))
        return regroup(self.groups, found)

    def check(self, spans: Sequence[range], memory: Memory | None) -> None:
        """Checks that no stage holds more than it may.

        Raises:
            ArgumentError: a stage does; the text names it and the bytes that it lacks.
        """
        if memory is None or memory.cap is None:
            return
        held = [share.memory for share in self.shares(spans, memory)]
        stage = held.index(max(held))
        if held[stage] > memory.cap:
            size, span = Units().size, spans[stage]
            raise ArgumentError(
                f"stage {stage}, with {_told(self.names[span.start : span.stop])}, takes {size(held[stage])} and lacks "
                f"{size(held[stage] - memory.cap)}: give it fewer layers, or split by 'memory'"
            )

    def shares(self, spans: Sequence[range], memory: Memory | None = None) -> tuple[Share, ...]:
        """Returns the costs and the memory of each stage."""
        cuts = [border.seconds for border in self.borders]
        return shares(self.loads, spans, cuts=cuts, memory=_informed(memory, self.borders))

    def costs(self, spans: Sequence[range], *, transfer: float = 0.0) -> Costs:
        """Returns the costs of the passes of each stage, for the simulator.

        Half of a stage's time to pack and unpack counts for its forward pass, half for the part of the backward pass
        that the previous stage waits for. Values travel as if each cut were crossed only to the next stage.

        Args:
            spans: the layers of each stage.
            transfer: seconds that a message takes from one stage to the next.
        """
        found = self.shares(spans)
        pairs = [(stage, stage + 1) for stage in range(len(spans) - 1)]
        volumes = [self.borders[span.start - 1].volume for span in spans[1:]] if self.borders else [0] * len(pairs)
        received = [0, *(self.borders[span.start - 1].kept if self.borders else 0 for span in spans[1:])]
        return Costs(
            [share.load.forward + share.exchange / 2 for share in found],
            [share.load.inward + share.exchange / 2 for share in found],
            [share.load.backward - share.load.inward for share in found],
            transfer=dict.fromkeys(pairs, transfer),
            volume=dict(zip(pairs, volumes, strict=True)),
            activation=[share.load.activation + enters for share, enters in zip(found, received, strict=True)],
        )


def _told(names: Sequence[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"


def _informed(memory: Memory | None, borders: Iterable[Border]) -> Memory | None:
    """Adds the bytes that enter at each cut; with recompute, a stage keeps all of them."""
    if memory is None:
        return None
    return replace(memory, entering=[border.volume if memory.recompute else border.kept for border in borders])
