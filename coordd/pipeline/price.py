"""Price of a stage, in time or in memory, as a function of where it begins and ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cost", "Floors", "Held", "Numbers", "Price"]

Numbers = NDArray[np.float64]
"""Whole numbers, so that their sums do not depend on the order of addition."""

Floors = list[tuple[Numbers, float]]
"""Pairs of a value per place, ascending, and the most by which it may grow from a stage's begin to its end."""


class Price(Protocol):
    """The price of stages."""

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """Returns the prices of a stage from each of some begins to each of as many ends; infinite if not allowed."""
        ...

    def floors(self, stage: int, bound: float) -> Floors:
        """Returns bounds on the length of stages whose price is within ``bound``; the price's own comes first."""
        ...

    def least(self) -> float:
        """Returns a lower bound on the highest price of any split, due to a single item."""
        ...


@dataclass
class Held:
    """The price in memory.

    Attributes:
        parameters: bytes of weights before each place.
        activations: bytes for one microbatch before each place.
        weight: for each stage the bytes that it holds per byte of weights.
        live: for each stage the number of microbatches between their passes.
        alive: for each stage the number of microbatches whose activations it holds.
        received: bytes for one microbatch that enter a stage that begins at each place.
    """

    parameters: Numbers
    activations: Numbers
    weight: Numbers
    live: Numbers
    alive: Numbers
    received: Numbers

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """Returns bytes."""
        weights = self.weight[stage] * (self.parameters[ends] - self.parameters[begins])
        kept = self.alive[stage] * (self.activations[ends] - self.activations[begins])
        held: Numbers = np.ceil(weights + self.live[stage] * self.received[begins] + kept)
        return held

    def floors(self, stage: int, bound: float) -> Floors:
        """Returns the bytes that the items before each place would take in the stage."""
        return [(self.weight[stage] * self.parameters + self.alive[stage] * self.activations, bound)]

    def least(self) -> float:
        """Returns the bound, given that item i cannot be in a stage after stage i."""
        latest = np.minimum(np.arange(len(self.parameters) - 1), len(self.alive) - 1)
        weight, alive = np.minimum.accumulate(self.weight)[latest], np.minimum.accumulate(self.alive)[latest]
        return float(np.max(weight * np.diff(self.parameters) + alive * np.diff(self.activations)))


@dataclass
class Cost:
    """The price in time, or in any other quantity to be balanced.

    Attributes:
        work: the work of the items before each place.
        edges: the cost for a stage of beginning or ending at each place.
    """

    work: Numbers
    edges: Numbers
    _limits: list[tuple[Held, float]] = field(default_factory=list, init=False)

    def limit(self, held: Held, cap: float) -> None:
        """Forbids stages that hold more than ``cap``."""
        self._limits.append((held, cap))

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """Returns units of cost; infinite above the limit."""
        cost: Numbers = self.work[ends] - self.work[begins] + self.edges[ends] + self.edges[begins]
        for held, cap in self._limits:
            cost[held(stage, begins, ends) > cap] = np.inf
        return cost

    def floors(self, stage: int, bound: float) -> Floors:
        """Returns the work before each place, and the memory floors of the limits."""
        return [(self.work, bound), *(floor for held, cap in self._limits for floor in held.floors(stage, cap))]

    def least(self) -> float:
        """Returns the bound: for the costliest item, a stage with it that begins and ends at the cheapest places."""
        before = np.minimum.accumulate((self.edges - self.work)[:-1])
        behind = np.minimum.accumulate((self.edges + self.work)[:0:-1])[::-1]
        return float(np.max(before + behind))
