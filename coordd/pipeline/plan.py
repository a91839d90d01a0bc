"""A schedule as a value: for each rank its actions, in order. Pure.

A plan covers all ranks of a pipeline, including replicas: the replicas of a stage take microbatches round-robin.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property

from coordd.errors import ArgumentError
from coordd.pipeline.action import Action, Kind

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """One training step, or several if steps overlap.

    Attributes:
        name: name of the schedule.
        microbatches: number of microbatches of all replicas together.
        placement: for each stage the ranks that have it; they take microbatches round-robin.
        actions: for each rank its actions, in order.
        versions: which version of the weights each stage uses for each microbatch; empty if there is only one.
        flows: pairs of stages: the second takes the results of the first; empty before they are known.
    """

    name: str
    microbatches: int
    placement: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    versions: tuple[tuple[int, ...], ...] = ()
    flows: tuple[tuple[int, int], ...] = field(default=(), compare=False)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    def rank(self, stage: int, microbatch: int) -> int:
        """Returns the rank that processes a microbatch in a stage."""
        ranks = self.placement[stage]
        return ranks[microbatch % len(ranks)]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the stages that it has."""
        held: list[list[int]] = [[] for _ in self.actions]
        for stage, ranks in enumerate(self.placement):
            for rank in ranks:
                held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    @cached_property
    def halved(self) -> tuple[frozenset[int], ...]:
        """For each stage the microbatches whose backward pass is split in two."""
        found: list[set[int]] = [set() for _ in self.placement]
        for action in itertools.chain(*self.actions):
            if action.kind is Kind.INPUT:
                found[action.stage].add(action.microbatch)
        return tuple(map(frozenset, found))

    def __str__(self) -> str:
        places = " | ".join(",".join(map(str, ranks)) for ranks in self.placement)
        lines = [f"{self.name}, {self.microbatches} microbatches, stages on {places}"]
        lines += [f"{rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions)]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parses the output of `str` for a plan whose weights have one version.

        Raises:
            ArgumentError: the text is not a plan.
        """
        try:
            head, *lines = text.strip().splitlines()
            name, microbatches, places = head.split(", ", 2)
            placement = [_numbers(ranks) for ranks in places.removeprefix("stages on ").split(" | ")]
            actions = [tuple(map(Action.parse, line.partition(":")[2].split())) for line in lines]
            return cls(name, int(microbatches.split()[0]), tuple(placement), tuple(actions))
        except (ValueError, IndexError) as error:
            raise ArgumentError(f"this is no plan of a pipeline ({error}): {text[:60]!r}") from error


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
