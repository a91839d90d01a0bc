from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import msgspec

from coordd.tuning.autotune import Progress
from coordd.tuning.picture import page
from tests.synthetic import START
from tests.tuning.found import RECORD

PAGE = page(RECORD)
CHARTS = [ET.fromstring(chart) for chart in re.findall(r"<svg.*?</svg>", PAGE, re.DOTALL)]  # noqa: S314 - our own


class Strict(HTMLParser):
    """Notes what is opened and closed, and what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.fetched += [f"{name}={value}" for name, value in attrs if name in {"src", "href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """In SVG, what has nothing inside closes itself."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else():
    parser = Strict()
    parser.feed(PAGE)
    assert parser.open == []
    assert parser.fetched == []
    assert "url(" not in PAGE
    assert "<script" not in PAGE


def test_it_says_first_what_came_of_it():
    assert "<h1>10.0 % less time a step: buckets=2</h1>" in PAGE
    assert "6 trials took 99 of 12,345 steps" in PAGE


def test_there_is_a_chart_of_all_trials_and_one_of_each_tuned_knob():
    titles = [chart.findall("text")[-1].text for chart in CHARTS]
    assert titles == ["trial", "fusion_mb", "cycle_ms", "buckets", "algorithm"]


def test_every_measured_trial_is_in_every_chart():
    for chart in CHARTS:
        dots = [one for one in chart if "dot" in one.get("class", "")]
        assert sorted(one[0].text.partition(":")[0] for one in dots) == ["1", "2", "3", "4", "5"]
    assert "2: buckets=2\n-10.0 %, faster, comparisons: 3" in {title.text for title in CHARTS[0].iter("title")}


def test_what_was_chosen_stands_out():
    chosen = [text.text for chart in CHARTS for text in chart.findall("text") if "chosen" in text.get("class", "")]
    assert chosen == ["32", "20", "2", "slices"]


def test_the_table_has_a_row_for_each_trial():
    rows = re.findall(r"<tr><td>(.*?)</tr>", PAGE)
    assert len(rows) == 6
    assert re.sub("<[^>]+>", "|", rows[1]).startswith("2||-10.0 %||9.00||3|||✓ faster|||buckets=2")


def test_a_hosts_name_cannot_break_the_page():
    assert "4 x &lt;Fast &amp; Cheap&gt;" in PAGE


def test_a_search_without_trials_can_be_drawn():
    empty = msgspec.structs.replace(RECORD, progress=Progress(start=START, best=START))
    assert "Nothing faster than the start so far" in page(empty)
