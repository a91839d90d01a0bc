"""Simulated jobs whose ranks join: bugs of that are found."""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest

from coordd_tools.sim.swarm import Swarm
from tests.simulation.join_mutants import JOIN_MUTANTS
from tests.simulation.planting import found

FIRST, ENOUGH = 100, 8000
LATE = {"joins_before_its_words_are_settled": 6316, "counts_joins_that_a_lock_has_overtaken": 6689}


@pytest.mark.parametrize("plant", JOIN_MUTANTS.values(), ids=JOIN_MUTANTS.keys())
def test_a_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert found(chain(range(FIRST), filter(races, range(FIRST, ENOUGH))), LATE.get(plant.__name__))


def races(seed: int) -> bool:
    """Whether ranks join while a plan is locked, and little else keeps them from it."""
    swarm = Swarm.draw(Random(seed))
    others = swarm.leave or swarm.contradiction or swarm.mismatch or swarm.fatal
    return swarm.join and swarm.steady and swarm.locks and not others
