"""Schedules drawn with letters."""

from __future__ import annotations

import pytest

from coordd.pipeline.chart import chart
from coordd.pipeline.schedules.schedule import one_f_one_b, zero_bubble
from coordd.pipeline.simulate import Costs, simulate
from tests.pipeline.plans import ALL, chained


def drawn(plan, width):
    lowered = chained(plan)
    return chart(lowered, simulate(lowered), width).splitlines()


def test_the_figure_of_one_forward_one_backward():
    assert drawn(one_f_one_b(3, 4), 44) == [
        "rank 0 F0F1F2........B0--F3B1--..B2--..B3--",
        "rank 1 ..F0F1....B0--F2B1--F3B2--..B3--....",
        "rank 2 ....F0B0--F1B1--F2B2--F3B3--........",
        "F forward, B backward, . idle",
    ]


def test_kinds_are_told_apart_without_colours():
    assert drawn(zero_bubble(2, 2), 21) == [
        "rank 0 F0F1..I0W0I1W1",
        "rank 1 ..F0I0F1I1W0W1",
        "F forward, I backward of inputs, W backward of weights, . idle",
    ]


def test_a_pass_that_is_too_short_for_its_number_has_its_letter():
    assert drawn(one_f_one_b(2, 2), 16)[:2] == ["rank 0 FF..B0.B1", "rank 1 .FB0FB1.."]


def test_many_ranks_share_a_lane():
    lines = drawn(one_f_one_b(64, 4), 70)
    assert len(lines) == 33
    assert lines[0].startswith("ranks 0-1   F")
    assert lines[-1].endswith("a small letter: idle for the most part")
    assert set("".join(line[12:] for line in lines[:-1])) <= set("FfBb.")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [1, 20, 80, 200])
def test_lines_are_equally_long_and_not_too_long(name, width):
    lines = drawn(ALL[name](4, 8), width)[:-1]
    assert len(set(map(len, lines))) == 1
    assert len(lines[0]) <= max(width, len("rank 0 ") + 1)


def test_a_plan_that_takes_no_time():
    plan = chained(one_f_one_b(2, 2))
    lines = chart(plan, simulate(plan, Costs.even(2, forward=0, inward=0, weight=0)), 20).splitlines()
    assert lines[0] == "rank 0 ............."
