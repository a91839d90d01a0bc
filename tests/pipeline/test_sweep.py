"""What a sweep leaves out is never missed: it finds what a plain dynamic programme without bounds finds."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.pipeline.price import Cost, Held, Price
from coordd.pipeline.sweep import Ways, evenest, lowest


def plainly(price: Price, items: int, stages: int) -> float:
    best = [0.0] + [math.inf] * items
    for stage in range(stages):
        following = [math.inf] * (items + 1)
        for end in range(stage + 1, items + 1):
            begins = np.arange(stage, end)
            prices = price(stage, begins, np.full(len(begins), end))
            following[end] = min(map(max, best[stage:end], prices))
        best = following
    return best[items]


def row(chance: random.Random, count: int) -> np.ndarray:
    """Small numbers, zeros among them, and a few that outweigh the rest."""
    values = [chance.choice([0, 1, 1]) * chance.randint(1, 20) for _ in range(count)]
    heavy = chance.choice([1, 1, 20, 1000])
    return np.array([value * (heavy if chance.random() < 0.1 else 1) for value in values], float)


def before(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], values.cumsum()])


@pytest.mark.parametrize("falling", [True, False])
@given(seed=st.integers(0, 2**32))
def test_the_least_memory_is_found_whatever_stages_hold(falling, seed):
    chance = random.Random(seed)
    items = chance.randint(1, 30)
    stages = chance.randint(1, items)
    live = np.array(sorted((chance.randint(1, 40) for _ in range(stages)), reverse=falling), float)
    weight = np.array([chance.choice([2.0, 2.3, 4.0]) for _ in range(stages)])
    alive = chance.choice([live, np.ones(stages)])
    held = Held(before(row(chance, items)), before(row(chance, items)), weight, live, alive, row(chance, items + 1))
    found, _ = lowest(held, items, stages)
    assert found == plainly(held, items, stages)


@pytest.mark.parametrize("capped", [True, False])
@given(seed=st.integers(0, 2**32))
def test_the_least_cost_is_found_and_the_split_keeps_it(capped, seed):
    chance = random.Random(seed)
    items = chance.randint(1, 30)
    stages = chance.randint(1, items)
    cost = Cost(before(1 + row(chance, items)), np.array([0, *row(chance, items - 1), 0]))
    if capped:
        live = np.arange(stages, 0.0, -1)
        held = Held(
            before(row(chance, items)),
            before(row(chance, items)),
            np.full(stages, 4.0),
            live,
            live,
            row(chance, items + 1),
        )
        cost.limit(held, plainly(held, items, stages) * chance.choice([1.0, 1.2]))
    found, ways = lowest(cost, items, stages)
    assert found == plainly(cost, items, stages)
    split = evenest(cost, found, ways)
    prices = [cost(stage, np.array([run.start]), np.array([run.stop])).item() for stage, run in enumerate(split)]
    assert (len(split), max(prices)) == (stages, found)


def test_one_heavy_item_does_not_widen_the_search():
    work = np.full(400, 10.0)
    work[7] = 4000.0
    found, ways = lowest(Cost(before(work), np.zeros(401)), 400, 100)
    assert found == 4000
    assert max(ways.longest) < 20


def test_places_are_those_on_the_way_from_the_begin_to_the_end():
    cost = Cost(before(np.full(6, 10.0)), np.zeros(7))
    assert Ways.within(cost, 20, items=6, stages=3).places == (range(1), range(2, 3), range(4, 5), range(6, 7))
    assert Ways.within(cost, 30, items=6, stages=3).places == (range(1), range(1, 4), range(3, 6), range(6, 7))
    assert not all(Ways.within(cost, 15, items=6, stages=3).places)
