from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from coordd.tuning.chart import Chart


def drawn(chart: Chart, tag: str, kind: str = ""):
    root = ET.fromstring(str(chart))  # noqa: S314 - our own
    return [one for one in root.iter(tag) if kind in one.get("class", "")]


def test_slower_is_higher_and_later_is_further_right():
    chart = Chart(400, 200, places=4, values=[0.8, 1.1])
    assert chart.y(1.1) < chart.y(1.0) < chart.y(0.8)
    assert chart.x(0) < chart.x(1) < chart.x(3)


@pytest.mark.parametrize("values", [[], [1.0], [0.01], [0.3, 0.9], [1.0, 80.0]])
def test_everything_lies_inside(values):
    chart = Chart(400, 200, places=len(values), values=values)
    for place, value in enumerate(values):
        chart.dot(place, value, kind="open", hint="")
        assert 0 < chart.y(value) < 200
        assert 0 < chart.x(place) < 400
    for line in drawn(chart, "line"):
        assert 0 <= float(line.get("y1")) <= 200


@pytest.mark.parametrize("values", [[], [0.98, 1.01], [0.3, 0.9], [0.01, 9.0]])
def test_there_is_a_readable_scale_with_the_start_on_it(values):
    chart = Chart(400, 200, places=2, values=values)
    scale = [text.text for text in drawn(chart, "text", "scale")]
    assert 2 <= len(scale) <= 8
    assert "100 %" in scale
    assert len(drawn(chart, "line", "start")) == 1


def test_what_is_off_the_chart_is_an_arrow():
    chart = Chart(400, 200, places=2, values=[0.9, 5.0])
    chart.dot(0, 0.9, kind="faster", hint="inside")
    chart.dot(1, 5.0, kind="no-gain", hint="outside")
    assert [one[0].text for one in drawn(chart, "circle")] == ["inside"]
    assert [one[0].text for one in drawn(chart, "polygon")] == ["outside"]


def test_text_cannot_break_the_page():
    chart = Chart(400, 200, places=1, values=[])
    chart.name(0, "<b>&")
    chart.title('"<script>"')
    chart.dot(0, 1.0, kind="open", hint="</title>")
    assert "<script>" not in str(chart)
    assert {text.text for text in drawn(chart, "text", "name")} == {"<b>&"}


def test_lines_and_spans_go_where_they_should():
    chart = Chart(400, 200, places=3, values=[0.5])
    chart.line([(0, 1.0), (2, 0.5)])
    chart.span(1, [0.7, 0.6, 0.9], kind="open")
    (line,) = drawn(chart, "polyline")
    assert line.get("points") == f"{chart.x(0):.1f},{chart.y(1.0):.1f} {chart.x(2):.1f},{chart.y(0.5):.1f}"
    (span,) = drawn(chart, "line", "span")
    assert (span.get("y1"), span.get("y2")) == (f"{chart.y(0.6):.1f}", f"{chart.y(0.9):.1f}")
