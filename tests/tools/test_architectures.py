"""The table of architectures is the list in the docs, and what comes of a job that dies is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

from coordd_tools.architectures import jobs
from coordd_tools.architectures.models import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_the_docs_list_what_the_tool_trains():
    rows = re.findall(r"^\| (\d+) \| `(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert [name for _, name in rows] == list(ARCHITECTURES)
    assert [int(number) for number, _ in rows] == list(range(1, 31))


class Launcher:
    """Starts a program that does its first task, and fails in the second."""

    def command(self, worker, **_):
        line = json.dumps({"name": "one", "stages": 2, "given": "built", "outcome": "match"})
        script = (
            f"import sys, pathlib; pathlib.Path(sys.argv[1], 'found.jsonl').write_text({line!r}); sys.exit('no luck')"
        )
        return [worker[0], "-c", script, worker[-1]]


def test_a_job_that_dies_is_told_and_the_rest_done_by_another(monkeypatch):
    monkeypatch.setattr(jobs.Launcher, "find", Launcher)
    found = list(jobs.results(["one"], [2], seconds=60.0))
    assert [(each.given, each.outcome.partition(":")[0]) for each in found] == [
        ("built", "match"),
        ("builder", "job failed"),
    ]
    assert "no luck" in found[-1].outcome
