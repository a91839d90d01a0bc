"""The transcripts in this folder: what is said, by whom, and what comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.stage import play

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_goes_as_written(path, request):
    shown = play(path)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(shown, "utf-8")
    assert path.read_text("utf-8") == shown, "read the difference, then: pytest tests/scenarios --rewrite"


def test_there_are_scenarios():
    assert SCENARIOS
