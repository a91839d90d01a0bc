"""What a stage costs, from where it begins and ends: in time, or in memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cost", "Floors", "Held", "Numbers", "Price"]

Numbers = NDArray[np.float64]
"""Whole numbers, so that sums of them do not depend on the order."""

Floors = list[tuple[Numbers, float]]
"""For each place a number, and by how much it may grow from where a stage begins to where it ends."""


class Price(Protocol):
    """What stages cost."""

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """The price of a stage from each of some places to each of as many others; infinite if it may not be."""
        ...

    def floors(self, stage: int, bound: float) -> Floors:
        """Says how long a stage can be whose price is within a bound; its own floor comes first."""
        ...

    def least(self) -> float:
        """A price that some stage of any split has at least, because of a single item."""
        ...


@dataclass
class Held:
    """The price in memory.

    Attributes:
        parameters: bytes of weights before each place.
        activations: bytes for one microbatch before each place.
        weight: for each stage how many bytes a byte of weights takes.
        live: for each stage how many microbatches it has between their passes.
        alive: for each stage of how many of them it has the activations.
        received: bytes for one microbatch that enter a stage that begins at each place.
    """

    parameters: Numbers
    activations: Numbers
    weight: Numbers
    live: Numbers
    alive: Numbers
    received: Numbers

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """Bytes."""
        weights = self.weight[stage] * (self.parameters[ends] - self.parameters[begins])
        kept = self.alive[stage] * (self.activations[ends] - self.activations[begins])
        held: Numbers = np.ceil(weights + self.live[stage] * self.received[begins] + kept)
        return held

    def floors(self, stage: int, bound: float) -> Floors:
        """What the items before each place would take."""
        return [(self.weight[stage] * self.parameters + self.alive[stage] * self.activations, bound)]

    def least(self) -> float:
        """An item is in none of the stages after the one of its own number."""
        latest = np.minimum(np.arange(len(self.parameters) - 1), len(self.alive) - 1)
        weight, alive = np.minimum.accumulate(self.weight)[latest], np.minimum.accumulate(self.alive)[latest]
        return float(np.max(weight * np.diff(self.parameters) + alive * np.diff(self.activations)))


@dataclass
class Cost:
    """The price in time, or in whatever else is to be even.

    Attributes:
        work: that of the items before each place.
        edges: what a stage pays that begins or ends at each place.
    """

    work: Numbers
    edges: Numbers
    _limits: list[tuple[Held, float]] = field(default_factory=list, init=False)

    def limit(self, held: Held, cap: float) -> None:
        """Forbids stages that hold more than that."""
        self._limits.append((held, cap))

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """Units of cost; infinite above the limit."""
        cost: Numbers = self.work[ends] - self.work[begins] + self.edges[ends] + self.edges[begins]
        for held, cap in self._limits:
            cost[held(stage, begins, ends) > cap] = np.inf
        return cost

    def floors(self, stage: int, bound: float) -> Floors:
        """The work before each place, and what it holds."""
        return [(self.work, bound), *(floor for held, cap in self._limits for floor in held.floors(stage, cap))]

    def least(self) -> float:
        """What a stage with that item costs that begins and ends where that is cheapest."""
        before = np.minimum.accumulate((self.edges - self.work)[:-1])
        behind = np.minimum.accumulate((self.edges + self.work)[:0:-1])[::-1]
        return float(np.max(before + behind))
