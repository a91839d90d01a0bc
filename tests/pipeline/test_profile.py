"""Profiles are split at what may be cut, and say what stages cost."""

from __future__ import annotations

import pytest

from coordd.errors import ArgumentError
from coordd.pipeline.load import Load, Memory
from coordd.pipeline.profile import Border, Profile
from coordd.pipeline.schedules.schedule import one_f_one_b
from coordd.pipeline.simulate import simulate
from tests.pipeline.plans import chained

LOADS = tuple(Load(1.0, 2.0, parameters=10, activation=100, inward=0.5) for _ in range(4))
GROUPS = tuple(range(at, at + 1) for at in range(4))
NAMES = ("a", "b", "c", "d")


def test_layers_that_stay_together_are_not_divided():
    found = Profile(NAMES, LOADS, (range(3), range(3, 4)))
    assert found.split(2) == (range(3), range(3, 4))
    with pytest.raises(ArgumentError, match="3 stages need 3 layers or groups of layers, and the model has 2"):
        found.split(3)


def test_a_cut_that_takes_long_is_avoided():
    borders = (Border(0.0), Border(9.0), Border(0.0))
    assert Profile(NAMES, LOADS, GROUPS).split(2) == (range(2), range(2, 4))
    assert Profile(NAMES, LOADS, GROUPS, borders).split(2) in {(range(1), range(1, 4)), (range(3), range(3, 4))}


def test_what_enters_counts_as_memory_where_it_is_kept():
    borders = tuple(Border(0.0, 50, kept) for kept in (0, 40, 0))
    found = Profile(NAMES, LOADS, GROUPS, borders)
    spans = (range(2), range(2, 4))
    plain = Memory(microbatches=4, state=0.0)
    assert [share.memory for share in found.shares(spans, plain)] == [40 + 2 * 200, 40 + 200 + 40]
    again = Memory(microbatches=4, state=0.0, recompute=True)
    assert [share.memory for share in found.shares(spans, again)] == [40 + 200, 40 + 200 + 50]


def test_the_evenest_in_memory_has_short_early_stages():
    found = Profile(NAMES * 2, LOADS * 2, tuple(range(at, at + 1) for at in range(8)))
    spans = found.split(2, by="memory", memory=Memory(microbatches=8, state=0.0))
    assert spans == (range(3), range(3, 8))


def test_stages_that_hold_too_much_are_named():
    found, spans = Profile(NAMES, LOADS, GROUPS), (range(3), range(3, 4))
    found.check(spans, Memory(cap=660, microbatches=4, state=0.0))
    found.check(spans, None)
    with pytest.raises(ArgumentError, match="stage 0, with 'a' to 'c', takes 660 B and lacks 60 B: give it fewer"):
        found.check(spans, Memory(cap=600, microbatches=4, state=0.0))
    with pytest.raises(
        ArgumentError, match="the least that works is 360; even then stage 1 takes 360 B and lacks 10 B"
    ):
        found.split(2, memory=Memory(cap=350, microbatches=4, state=0.0))


def test_costs_are_those_of_the_stages_and_their_cuts():
    borders = tuple(Border(0.25, 50, 40) for _ in range(3))
    costs = Profile(NAMES, LOADS, GROUPS, borders).costs((range(2), range(2, 3), range(3, 4)), transfer=0.5)
    assert costs.forward == [2.125, 1.25, 1.125]
    assert costs.inward == [1.125, 0.75, 0.625]
    assert costs.weight == [3.0, 1.5, 1.5]
    assert (costs.transfer[0, 1], costs.volume[1, 2]) == (0.5, 50)
    assert costs.activation == [200, 140, 140]
    found = simulate(chained(one_f_one_b(3, 3)), costs)
    assert found.peaks == (600, 280, 140)
    assert found.volume == 2 * 2 * 3 * 50
