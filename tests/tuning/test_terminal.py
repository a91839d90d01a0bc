from __future__ import annotations

import io

import msgspec
from rich.console import Console

from coordd.tuning.autotune import Progress
from coordd.tuning.terminal import show
from tests.synthetic import START
from tests.tuning.found import RECORD


def shown(record=RECORD) -> list[str]:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    show(record, console)
    return console.file.getvalue().splitlines()


def test_it_says_first_what_came_of_it():
    assert shown()[0] == "10.0 % less time a step: buckets=2"


def test_every_trial_has_a_bar_as_long_as_its_step_time():
    length = {line.split()[-1]: line.count("█") for line in shown() if "██" in line}
    assert length["buckets=2"] < length["start"] < length["fusion_mb=8"] <= length["buckets=16"] <= 24


def test_every_trial_says_what_came_of_it():
    found = {line.split()[0]: line for line in shown() if line.strip()[:1].isdigit()}
    assert "+8.0 %" in found["1"]
    assert "· no gain" in found["1"]
    assert "✓ faster" in found["2"]
    assert "? unclear" in found["4"]
    assert "… open" in found["6"]
    assert "%" not in found["6"], "it was not measured yet"


def test_each_knob_shows_its_choices():
    row = next(line for line in shown() if line.startswith("buckets"))
    assert row.split()[:10] == ["buckets", "1", "▁", "2", "▁", "4", "8", "16", "█", "-14.5"]


def test_a_search_without_trials_can_be_shown():
    empty = msgspec.structs.replace(RECORD, progress=Progress(start=START, best=START))
    assert [line for line in shown(empty) if line] == [
        "nothing faster than the start so far",
        "0 trials took 0 of 0 steps; the search goes on with the next run",
    ]
