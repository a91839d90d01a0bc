"""What the layers of a model cost, how they are best split, and what a schedule of the stages then costs. Pure."""

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
    """What a cut between two layers costs for one microbatch.

    Attributes:
        seconds: that either side of it needs to pack and unpack values and gradients.
        volume: bytes that cross it, in each direction.
        kept: bytes of them that the stage behind it keeps, and none of its layers counts as an activation.
    """

    seconds: float = 0.0
    volume: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Profile:
    """The layers of a model, with what they cost for one microbatch.

    Attributes:
        names: of the layers.
        loads: of each.
        groups: runs of layers that no cut divides.
        borders: of each cut between layers, of which there is one less than there are layers; nothing is known of what
            cuts cost if it is empty.
    """

    names: tuple[str, ...]
    loads: tuple[Load, ...]
    groups: tuple[range, ...]
    borders: tuple[Border, ...] = ()

    def split(self, stages: int, *, by: By = "time", memory: Memory | None = None) -> tuple[range, ...]:
        """Splits as evenly as can be; for each stage its layers.

        Args:
            stages: how many there are.
            by: what is to be even, see `coordd.pipeline.partition.split`.
            memory: what stages hold, and may hold at most.

        Raises:
            ArgumentError: the layers do not suffice, or do not fit into the memory.
        """
        items = [Load.total(self.loads[group.start : group.stop]) for group in self.groups]
        between = [self.borders[group.start - 1] for group in self.groups[1:]] if self.borders else []
        cuts = [border.seconds for border in between]
        found = split(items, stages, by=by, cuts=cuts, memory=_informed(memory, between))
        return regroup(self.groups, found)

    def check(self, spans: Sequence[range], memory: Memory | None) -> None:
        """Refuses stages that hold more than they may.

        Raises:
            ArgumentError: one does; it is named, and how much it lacks.
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
        """Reports what each stage has to do and to hold."""
        cuts = [border.seconds for border in self.borders]
        return shares(self.loads, spans, cuts=cuts, memory=_informed(memory, self.borders))

    def costs(self, spans: Sequence[range], *, transfer: float = 0.0) -> Costs:
        """Says what the passes of each stage cost, for the simulator.

        What a stage needs to pack and unpack counts half for its forward pass, half for what the stage before waits
        for. Values travel as if each cut were crossed to the next stage only.

        Args:
            spans: the layers of each stage.
            transfer: seconds that something is on its way from one stage to the next.
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
    """Tells what enters at each cut, all of which is kept where only that is."""
    if memory is None:
        return None
    return replace(memory, entering=[border.volume if memory.recompute else border.kept for border in borders])
