"""Partition by dynamic programming: the best split of a row of items into a number of runs, none empty. Pure.

One sweep for each stage finds, for each place where it may end, the best split up to there::

    best(s, b)  =  min over a < b of  join(best(s - 1, a), price(s, a, b))        join: max, or +

Prices need not be monotone (cuts differ) nor equal for all stages (early ones hold more), as greedy search would
require. A sweep considers only stages within a bound on the price, and single items, and only places from which such
stages lead to the end. If the answer is within the bound, or equals a lower bound for every split, then no omitted
split is better; otherwise the bound is raised. So the time is at most about ``items * stages * (items of the longest
stage within the bound)``: seconds for 10,000 items in 2,500 stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from coordd.pipeline.price import Floors, Numbers, Price

__all__ = ["Ways", "evenest", "lowest"]

Places = NDArray[np.intp]

_Rate = Callable[[int, slice, slice], Numbers]

_GROWTH = 1.25
_COARSE = 2.0**16  # units of the highest price, so that squares are added exactly and noise does not matter
_PATIENCE = 3e8  # steps, which take a few seconds


@dataclass(frozen=True)
class Ways:
    """The stages that a sweep considers: within a bound or of one item, and on a path from the begin to the end.

    Attributes:
        places: where each stage may begin; the last is the end. None of them is empty if there is a path.
        longest: the most items that each stage may have.
    """

    places: tuple[range, ...]
    longest: tuple[int, ...]

    @classmethod
    def within(cls, price: Price, bound: float, *, items: int, stages: int) -> Ways:
        """Computes them: forward to the latest places, and backward to the earliest."""
        latest, earliest, longest = [0], [items], []
        for stage in range(stages):
            end = int(_ends(price.floors(stage, bound), np.array(latest[-1:]))[0])
            latest.append(min(end, items - (stages - stage - 1)))
        for stage in reversed(range(stages)):
            floors = price.floors(stage, bound)
            earliest.append(max(stage, _begin(floors, earliest[-1])))
            begins = np.arange(earliest[-1], latest[stage] + 1)
            longest.append(int(np.max(_ends(floors, begins) - begins, initial=1)))
        places = (range(first, last + 1) for first, last in zip(reversed(earliest), latest, strict=True))
        return cls(tuple(places), tuple(reversed(longest)))

    @property
    def steps(self) -> int:
        """An upper bound on the number of these stages."""
        return sum(len(places) * longest for places, longest in zip(self.places, self.longest, strict=False))


def _ends(floors: Floors, begins: Places) -> Places:
    """Returns the latest ends of stages that begin at ``begins``; one unit of slack, because floors are rounded."""
    ends = [np.searchsorted(floor, floor[begins] + limit + 1, side="right") - 1 for floor, limit in floors]
    return np.maximum(np.minimum.reduce(ends), begins + 1)


def _begin(floors: Floors, end: int) -> int:
    """Returns the earliest begin of a stage that ends at ``end``."""
    begin = max(int(np.searchsorted(floor, floor[end] - limit - 1)) for floor, limit in floors)
    return min(begin, end - 1)


def lowest(price: Price, items: int, stages: int) -> tuple[float, Ways]:
    """Finds the split whose costliest stage is cheapest; returns that stage's price, and the ways that were searched.

    There must be a split of finite price.
    """
    totals = [price.floors(stage, np.inf)[0][0][-1] for stage in range(stages)]
    bound = float(1 / np.sum(1 / np.maximum(totals, 1)))  # the price of each stage if items could be divided
    least = price.least()
    while True:
        bound *= _GROWTH
        ways = Ways.within(price, bound, items=items, stages=stages)
        best, _ = _sweep(price, ways, join=np.maximum)
        if best <= max(bound, least):
            return best, ways


def evenest(cost: Price, highest: float, ways: Ways) -> tuple[range, ...]:
    """Returns the split with the least sum of squares; among several, the one whose last stages are short.

    Args:
        cost: of a stage.
        highest: the most that a stage may cost.
        ways: contain such a split; all splits are searched if that takes only seconds.
    """
    items, stages = ways.places[-1].start, len(ways.longest)
    every = Ways.within(cost, highest, items=items, stages=stages)

    def square(stage: int, begins: slice, ends: slice) -> Numbers:
        prices = cost(stage, begins, ends)
        squares: Numbers = np.square(np.rint(prices * (_COARSE / highest)))
        squares[prices > highest] = np.inf
        return squares

    ways = every if every.steps < _PATIENCE else ways
    _, lengths = _sweep(square, ways, join=np.add)
    ends = [items]
    for stage in reversed(range(stages)):
        ends.append(ends[-1] - int(lengths[stage][ends[-1] - ways.places[stage + 1].start]))
    return tuple(range(begin, end) for begin, end in pairwise(reversed(ends)))


def _sweep(price: _Rate, ways: Ways, *, join: np.ufunc) -> tuple[float, list[Places]]:
    """Returns the lowest price, and for each stage and each place where it may end its best number of items.

    Among equally good lengths it takes the shortest.
    """
    lengths: list[Places] = []
    if not all(ways.places):
        return np.inf, lengths
    best = np.zeros(1)
    for stage, ((begins, ends), longest) in enumerate(zip(pairwise(ways.places), ways.longest, strict=True)):
        following, chosen = np.full(len(ends), np.inf), np.zeros(len(ends), np.min_scalar_type(longest))
        for length in range(1, longest + 1):
            first, last = max(begins.start, ends.start - length), min(begins.stop, ends.stop - length)
            if first >= last:
                continue
            there = slice(first + length - ends.start, last + length - ends.start)
            prices = price(stage, slice(first, last), slice(first + length, last + length))
            joined = join(best[first - begins.start : last - begins.start], prices)
            better = joined < following[there]
            np.copyto(following[there], joined, where=better)
            chosen[there][better] = length
        best = following
        lengths.append(chosen)
    return float(best[-1]), lengths
