from __future__ import annotations

import pytest

from coordd.monitoring.status.paths import seen_from
from coordd.monitoring.status.probe_result import Life
from coordd.monitoring.status.report import Stack, Submission
from tests.monitoring.status.made import seen, standing, survey

LINES = (
    "/home/me/digits/train.py:9 in <module>: main('/home/me/digits')",
    "/usr/lib/python3.11/threading.py:3 in wait",
)
STACK = Stack("MainThread", LINES)
JOB = survey(
    standing(0, stacks=(STACK,), last=Submission("w", "/home/me/digits/model/net.py:31", 1.0)),
    seen(1, life=Life.RUNNING, stacks=(STACK,)),
    standing(2, last=None),
)


@pytest.mark.parametrize(
    ("folder", "line", "site"),
    [
        ("/home/me/digits", "train.py:9 in <module>: main('/home/me/digits')", "model/net.py:31"),
        ("/home/me/", "digits/train.py:9 in <module>: main('/home/me/digits')", "digits/model/net.py:31"),
        ("/home/me/dig", LINES[0], "/home/me/digits/model/net.py:31"),
        ("/", LINES[0], "/home/me/digits/model/net.py:31"),
    ],
)
def test_files_below_the_folder_lose_what_they_have_in_common_with_it(folder, line, site):
    first, second, third = seen_from(folder, JOB).sightings
    assert first.standing.last.site == site
    assert first.standing.stacks[0].lines == second.stacks[0].lines == (line, LINES[1])
    assert third == JOB.sightings[2]
