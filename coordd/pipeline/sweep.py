"""Dynamic programming over runs: the best split of a row of items in a number of stages, none empty. Pure.

One sweep for each stage finds, for each place where it may end, the best split up to there::

    best(s, b)  =  min over a < b of  join(best(s - 1, a), price(s, a, b))        join: max, or +

Prices need not be monotone (cuts differ) nor alike for all stages (early ones hold more), which greedy search would
need. A sweep looks only at stages within a bound on the price. Stages that cost more are not in the answer if it lies
within the bound, and otherwise the bound is raised. So the time is about ``items * stages * (items of the longest stage
within the bound)``: seconds for 10,000 items in 2,500 stages of similar cost, more where one item outweighs thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cost", "Even", "Held", "Numbers", "Price", "cheapest", "lowest"]

Numbers = NDArray[np.float64]
"""Whole numbers, so that sums of them do not depend on the order."""

_GROWTH = 1.25
_COARSE = 2.0**16  # units of the highest price, so that squares can be added exactly, and noise makes no difference


class Price(Protocol):
    """What stages cost."""

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """The price of a stage from each of some places to each of as many others; infinite if it may not be."""
        ...

    def floor(self, stage: int) -> Numbers:
        """For each place a number that grows from one to another at most by the price of the stage between them."""
        ...


@dataclass
class Held:
    """The price in memory.

    Attributes:
        parameters: bytes of weights before each place.
        activations: bytes for one microbatch before each place.
        weight: for each stage how many bytes a byte of weights takes.
        live: for each stage how many microbatches' activations it has.
    """

    parameters: Numbers
    activations: Numbers
    weight: Numbers
    live: Numbers

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """Bytes."""
        weights = self.weight[stage] * (self.parameters[ends] - self.parameters[begins])
        held: Numbers = np.ceil(weights + self.live[stage] * (self.activations[ends] - self.activations[begins]))
        return held

    def floor(self, stage: int) -> Numbers:
        """What the items before each place would take."""
        held: Numbers = self.weight[stage] * self.parameters + self.live[stage] * self.activations
        return held


@dataclass
class Cost:
    """The price in time, or in whatever else is to be even.

    Attributes:
        work: that of the items before each place.
        edges: what a stage pays that begins or ends at each place.
    """

    work: Numbers
    edges: Numbers
    _held: Held | None = field(default=None, init=False)
    _cap: float = field(default=np.inf, init=False)

    def limit(self, held: Held, cap: float) -> None:
        """Forbids stages that hold more than that."""
        self._held, self._cap = held, cap

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """Units of cost; infinite above the limit."""
        cost: Numbers = self.work[ends] - self.work[begins] + self.edges[ends] + self.edges[begins]
        if self._held is not None:
            cost[self._held(stage, begins, ends) > self._cap] = np.inf
        return cost

    def floor(self, stage: int) -> Numbers:  # noqa: ARG002 - all stages alike
        """The work alone."""
        return self.work


@dataclass
class Even:
    """The square of a cost that is not above the highest: the sum is lowest where stages are even."""

    cost: Cost
    highest: float

    def __call__(self, stage: int, begins: slice, ends: slice) -> Numbers:
        """A whole number."""
        cost = self.cost(stage, begins, ends)
        square: Numbers = np.square(np.rint(cost * (_COARSE / self.highest)))
        square[cost > self.highest] = np.inf
        return square

    def floor(self, stage: int) -> Numbers:
        """That of the cost: the bound is one on the cost, too."""
        return self.cost.floor(stage)


def lowest(price: Price, items: int, stages: int) -> float:
    """The highest price of a stage in the split for which that is lowest; there must be a split of finite price."""
    totals = np.array([price.floor(stage)[-1] for stage in range(stages)])
    bound = float(1 / np.sum(1 / np.maximum(totals, 1)))  # what each would pay if items could be divided
    while True:
        bound *= _GROWTH
        best, _ = _sweep(price, items, stages, join=np.maximum, bound=bound)
        if best <= bound:
            return best


def cheapest(price: Price, items: int, stages: int, *, bound: float) -> tuple[range, ...]:
    """The split whose prices have the lowest sum, within a bound on the floors of its stages; last stages are short."""
    _, lengths = _sweep(price, items, stages, join=np.add, bound=bound)
    found: list[range] = []
    end = items
    for stage in reversed(range(stages)):
        begin = end - int(lengths[stage, end - stage - 1]) - 1
        found.append(range(begin, end))
        end = begin
    return tuple(reversed(found))


def _sweep(price: Price, items: int, stages: int, *, join: np.ufunc, bound: float) -> tuple[float, NDArray[np.uint64]]:
    """Finds the best split, and for each stage and each place it may end how many items more than one it then has.

    A stage begins at the earliest at its number, for those before it have an item each, and leaves one to each that
    follows, so there are as many places as items to spare, and one. They are counted from the earliest.
    """
    places = items - stages + 1
    best = np.full(places, np.inf)
    best[0] = 0
    lengths = np.zeros((stages, places), np.min_scalar_type(places))
    for stage in range(stages):
        longest = _longest(price.floor(stage)[stage : stage + places + 1], bound)
        following = np.full(places, np.inf)
        for more in range(min(longest, places)):
            rest = places - more
            begins, ends = slice(stage, stage + rest), slice(stage + 1 + more, stage + 1 + places)
            joined = join(best[:rest], price(stage, begins, ends))
            better = joined < following[more:]
            np.copyto(following[more:], joined, where=better)
            lengths[stage, more:][better] = more
        best = following
    return float(best[-1]), lengths


def _longest(floor: Numbers, bound: float) -> int:
    """The most items that a stage within the bound can have."""
    ends = np.searchsorted(floor, floor + bound, side="right")
    return int(np.max(ends - np.arange(len(floor)))) - 1
