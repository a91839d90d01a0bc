from __future__ import annotations

import io

import pytest
from rich.console import Console

from coordd.monitoring.timeline.journal import Journal
from coordd.monitoring.timeline.summary import summarize
from coordd.monitoring.timeline.terminal import headline, show
from coordd.monitoring.timeline.trace import find
from tests.monitoring.timeline.recorded import record, training


@pytest.fixture
def summary(tmp_path):
    for rank in range(2):
        record(tmp_path, rank, training(rank, late=0.025))
    return summarize([Journal(trace.rank, trace.events()) for trace in find(tmp_path)])


def test_the_answer_is_a_sentence(summary):
    assert headline(summary) == (
        "a step takes 100.00 ms: 76.50 compute, 23.50 exposed communication, 24 % "
        "(12.50 late ranks, 1.00 negotiation, 10.00 transfer, 0.00 other)"
    )


def test_tables_fit_into_eighty_columns_and_tell_all(summary):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(summary, console)
    text = console.file.getvalue()
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "100.00", "64.00", "25.00", "1.00", "10.00", "0.00"] in [row[:7] for row in rows]
    assert ["1", "100.00", "89.00", "0.00", "1.00", "10.00", "0.00"] in [row[:7] for row in rows]
    assert ["1", "8", "100", "%", "25.00", "25.00"] in rows
    assert sum(row[-2:] == ["rank", "1"] for row in rows) == 5


def test_bars_can_be_read_without_colours(summary):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(summary, console)
    text = console.file.getvalue()
    assert "bars:  # compute  ! late ranks  ? negotiation  = transfer  . other" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[7] for row in rows if len(row) == 8 and row[0] in {"0", "1"}] == ["#########!!!?=", "############?="]
    assert text.isascii()


def test_names_are_no_markup(summary):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(summary._replace(anchor="[red]x[/nothing]"), console)
    assert "[red]x[/nothing]" in console.file.getvalue()
