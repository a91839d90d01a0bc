"""Pictures of schedules: everything is in them once, nothing lies outside, and they stay small."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import pytest

from coordd.pipeline.action import COMPUTE
from coordd.pipeline.picture import draw
from coordd.pipeline.schedules.schedule import gpipe, interleaved, one_f_one_b, pipedream
from coordd.pipeline.simulate import Costs, Timeline, simulate
from coordd.pipeline.units import Units
from tests.pipeline.plans import ALL, chained

SVG = "{http://www.w3.org/2000/svg}"


def parsed(picture):
    return ET.fromstring(picture)  # noqa: S314 - our own


def drawn(plan, **options):
    lowered = chained(plan)
    return parsed(draw(lowered, simulate(lowered), **options))


def boxes(root):
    return [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def passes(root):
    return Counter(box.findtext(f"{SVG}title").partition(",")[0] for box in boxes(root))


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", ALL)
def test_every_pass_is_drawn_once(name):
    plan = ALL[name](4, 8)
    wanted = Counter(str(action) for actions in plan.actions for action in actions if action.kind in COMPUTE)
    assert passes(drawn(plan)) == wanted


@pytest.mark.parametrize("plan", [interleaved(3, 5, replicas=2), one_f_one_b(100, 50)], ids=["small", "large"])
def test_nothing_is_drawn_outside(plan):
    root = drawn(plan)
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert 0 <= x <= x + float(rect.get("width")) <= width
        assert 0 <= y <= y + float(rect.get("height")) <= height


def test_passes_of_a_rank_do_not_lie_on_each_other():
    places = sorted(tuple(float(box.get(name)) for name in ("y", "x", "width")) for box in boxes(drawn(gpipe(4, 8))))
    assert len({y for y, _, _ in places}) == 4
    for (y, x, width), (below, right, _) in pairwise(places):
        assert y != below or x + width <= right


def test_the_head_has_the_numbers():
    told = texts(drawn(one_f_one_b(4, 8), units=Units("units", "activations")))
    assert "1f1b: 4 ranks, 4 stages, 8 microbatches" in told
    assert "makespan 33 units, bubble 27.3 %, peak 4 activations" in told
    assert {"forward", "backward", "idle", "rank 0", "rank 3"} <= set(told)
    assert "backward of weights" not in told


def test_a_title_is_written_safely():
    assert "<b>&" in texts(drawn(gpipe(2, 2), title="<b>&"))


def test_chunks_of_a_rank_have_shades_of_a_colour():
    root = drawn(interleaved(2, 2, chunks=3))
    fills = {box.findtext(f"{SVG}title").partition(",")[0]: box.get("fill") for box in boxes(root)}
    assert len({fills["0F0"], fills["2F0"], fills["4F0"]}) == 3
    assert fills["0F0"] == fills["1F0"]


def test_it_shows_when_weights_change():
    def marks(plan):
        return sum(path.get("stroke-width") == "2" for path in drawn(plan).iter(f"{SVG}path")) - 1  # but for the key's

    assert marks(one_f_one_b(3, 6)) == 3
    assert marks(pipedream(3, 6)) == 18


def test_what_was_measured_lies_below_on_the_same_scale():
    plan = chained(gpipe(2, 2))
    short, long = (simulate(plan, Costs.even(2, forward=forward)) for forward in (1.0, 3.0))
    root = parsed(draw(plan, short, measured=long))
    assert [told for told in texts(root) if "makespan" in told] == [
        "predicted: makespan 9 s, bubble 33.3 %, peak 2 B",
        "measured: makespan 15 s, bubble 33.3 %, peak 2 B",
    ]
    backward = [box for box in boxes(root) if box.findtext(f"{SVG}title").startswith("1B0")]
    assert backward[0].get("width") == backward[1].get("width")
    assert set(passes(root).values()) == {2}


def test_a_large_plan_makes_a_small_picture():
    plan = one_f_one_b(300, 20, replicas=4)
    lowered = chained(plan)
    picture = draw(lowered, simulate(lowered))
    root = parsed(picture)
    assert len(picture) < 500_000
    assert not boxes(root)
    told = texts(root)
    assert sum(text.startswith("ranks ") for text in told) == 60
    assert "ranks 280-299" in told
    assert any(text.startswith("a lane is of 20 ranks") for text in told)


def test_many_microbatches_do_not_make_a_large_picture():
    lowered = chained(one_f_one_b(4, 1000))
    root = parsed(draw(lowered, simulate(lowered)))
    assert not boxes(root)
    assert sum(text.startswith("rank ") for text in texts(root)) == 4


def test_the_busiest_picture_is_not_large():
    lowered = chained(ALL["zb-v"](32, 64, replicas=2))
    timeline = simulate(lowered)
    assert len(draw(lowered, timeline, measured=timeline)) < 2_000_000


def test_a_plan_that_takes_no_time_is_drawn():
    plan = chained(gpipe(2, 2))
    nothing = Timeline(((), ()), (0.0, 0.0), 0, 0.0)
    assert "makespan 0 s, bubble 0.0 %, peak 0 B" in texts(parsed(draw(plan, nothing)))
    instant = simulate(plan, Costs.even(2, forward=0, inward=0, weight=0))
    assert len(passes(parsed(draw(plan, instant)))) == 8
