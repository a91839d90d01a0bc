"""Which ranks share a lane, and how busy they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.pipeline.action import Kind
from coordd.pipeline.lanes import busy, lanes, name
from coordd.pipeline.schedules.schedule import gpipe, one_f_one_b
from coordd.pipeline.simulate import simulate
from tests.pipeline.plans import chained


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 40))
def test_every_rank_has_one_lane(stages, replicas, most):
    cut = lanes(gpipe(stages, 1, replicas=replicas), most)
    assert [rank for lane in cut for rank in lane] == list(range(stages * replicas))
    assert len(cut) <= most


def test_lanes_are_of_one_replica_and_equally_long_where_that_is_near():
    cut = lanes(gpipe(250, 1, replicas=4), 64)
    assert {len(lane) for lane in cut} == {25}


def test_lanes_have_names():
    assert [name(range(3, 4)), name(range(3, 6))] == ["rank 3", "ranks 3-5"]


def test_a_cell_has_the_parts_of_its_ranks():
    timeline = simulate(chained(gpipe(2, 1)))  # 0F0 from 0 to 1, 1F0 to 2, 1B0 to 4, 0B0 to 6
    (row,) = busy(timeline, [range(2)], cells=3, until=6.0)
    assert row == [
        {Kind.FORWARD: 0.5},
        {Kind.BACKWARD: 0.5},
        {Kind.BACKWARD: 0.5},
    ]


@given(st.integers(1, 50), st.integers(1, 70))
def test_nothing_is_lost_in_cells(most, cells):
    plan = chained(one_f_one_b(20, 7))
    timeline = simulate(plan)
    cut = lanes(plan, most)
    found = busy(timeline, cut, cells=cells, until=timeline.makespan)
    total = sum(sum(cell.values()) * len(lane) for lane, row in zip(cut, found, strict=True) for cell in row)
    assert total * timeline.makespan / cells == pytest.approx(20 * 7 * 3)
    assert all(sum(cell.values()) <= 1 + 1e-9 for row in found for cell in row)
