"""Simulated jobs with foremen between the ranks and the coordinator: bugs of theirs are found."""

from __future__ import annotations

from random import Random

import pytest

from coordd_tools.sim.setting import Settings
from coordd_tools.sim.swarm import Swarm
from tests.simulation.planting import found
from tests.simulation.tree_mutants import TREE_MUTANTS

ENOUGH = 3000
LATE = {"counts_new_tensors_that_a_lock_has_overtaken": 2030}


def settings(seed: int) -> Settings:
    rng = Random(seed)
    return Settings.draw(rng, Swarm.draw(rng))


@pytest.mark.parametrize("plant", TREE_MUTANTS.values(), ids=TREE_MUTANTS.keys())
def test_a_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert found(filter(has_foremen, range(ENOUGH)), LATE.get(plant.__name__))


def has_foremen(seed: int) -> bool:
    return not settings(seed).is_star


def test_seeds_draw_trees_of_several_levels():
    drawn = [settings(seed) for seed in range(200)]
    assert 40 < sum(not one.is_star for one in drawn) < 160
    assert any(place.parent > 0 and place.children for one in drawn for place in one.posts)
