from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from coordd.monitoring.timeline.journal import Journal
from coordd.monitoring.timeline.picture import picture
from coordd.monitoring.timeline.summary import summarize
from coordd.monitoring.timeline.trace import find
from tests.monitoring.timeline.recorded import passage, record, training

SVG = "{http://www.w3.org/2000/svg}"


def drawn(folder, *, more=(), late=0.025):
    for rank in range(2):
        record(folder, rank, [*training(rank, late=late), *more])
    journals = [Journal(trace.rank, trace.events()) for trace in find(folder)]
    return ET.fromstring(picture(summarize(journals), journals))  # noqa: S314 - our own


def bars(root):
    return [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_every_rank_has_its_row_and_all_parts(tmp_path):
    root = drawn(tmp_path)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "rank 0" in texts
    assert "rank 1" in texts
    hints = [bar.findtext(f"{SVG}title") for bar in bars(root)]
    assert "waiting for rank 1: 25.000 ms" in hints
    assert "ALLREDUCE g0 and 1 more, 2000000 bytes, waiting for rank 1: 25.000 ms" in hints
    assert sum(hint == "transfer: 10.000 ms" for hint in hints) == 2
    assert "ALLREDUCE g0 and 1 more, 2000000 bytes, transfer: 10.000 ms" in hints


def test_nothing_is_drawn_outside(tmp_path):
    root = drawn(tmp_path, more=[passage(90, 1000.3, landed=1000.9)])
    _, _, width, height = map(float, root.get("viewBox").split())
    for bar in bars(root):
        x, y = float(bar.get("x")), float(bar.get("y"))
        assert 0 <= x <= x + float(bar.get("width")) <= width + 0.2
        assert 0 <= y <= y + float(bar.get("height")) <= height


def test_bars_of_operations_do_not_lie_on_each_other(tmp_path):
    more = [
        passage(100 + number, 1000.0 + 0.001 * number, landed=1000.9, names=(f"x{number}",)) for number in range(20)
    ]
    thin = [bar for bar in bars(drawn(tmp_path, more=more)) if "thin" in bar.get("class")]
    places = sorted((bar.get("y"), float(bar.get("x")), float(bar.get("width"))) for bar in thin)
    assert len({y for y, _, _ in places}) <= 16
    for (y, x, width), (below, right, _) in pairwise(places):
        assert y != below or x + width <= right + 0.2


@pytest.mark.parametrize("name", ["<b>&", '"'])
def test_names_are_written_safely(tmp_path, name):
    hints = [bar.findtext(f"{SVG}title") for bar in bars(drawn(tmp_path, more=[]))]
    assert hints
    for rank in range(2):
        items = [passage(step + 1, 1000.0 + step, landed=1000.5 + step, names=(name,)) for step in range(4)]
        record(tmp_path, rank, items)
    journals = [Journal(trace.rank, trace.events()) for trace in find(tmp_path)]
    assert name in picture_texts(picture(summarize(journals), journals))


def picture_texts(text):
    return " ".join(title.text for title in ET.fromstring(text).iter(f"{SVG}title"))  # noqa: S314 - our own
