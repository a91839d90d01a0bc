"""Which ranks have which stage."""

from __future__ import annotations

import pytest

from coordd.errors import ArgumentError
from coordd.pipeline.schedules.placement import fold, loop, spread


def test_each_pipeline_is_a_run_of_ranks():
    assert spread(3, 2) == ((0, 3), (1, 4), (2, 5))


def test_with_a_number_for_each_stage_its_replicas_are():
    assert spread(3, [1, 2, 1]) == ((0,), (1, 2), (3,))


def test_a_number_for_each_stage_is_wanted():
    with pytest.raises(ArgumentError, match="2 numbers of replicas for 3 stages"):
        spread(3, [1, 2])


def test_stages_go_round_and_round():
    assert loop(2, 3) == ((0,), (1,), (0,), (1,), (0,), (1,))
    assert loop(2, 2, replicas=2) == ((0, 2), (1, 3), (0, 2), (1, 3))


def test_stages_go_there_and_back():
    assert fold(3) == ((0,), (1,), (2,), (2,), (1,), (0,))
    assert fold(2, replicas=2) == ((0, 2), (1, 3), (1, 3), (0, 2))
