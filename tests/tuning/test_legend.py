from __future__ import annotations

import msgspec
import pytest

from coordd.tuning.autotune import Outcome
from coordd.tuning.legend import MARKS, changes, fastest, headline, percent, summary, word
from tests.synthetic import START
from tests.tuning.found import RECORD, other

PROGRESS = RECORD.progress


def test_changes_are_told_with_their_knobs():
    assert changes(START, START) == "as at the start"
    assert changes(other(buckets=2, cycle_ms=0.5, algorithm="ring"), START) == "cycle_ms=0.5 buckets=2 algorithm=ring"


def test_values_are_written_as_one_would_type_them():
    assert [word(value) for value in (32.0, 0.5, 2, "ring")] == ["32", "0.5", "2", "ring"]


def test_a_step_time_is_told_as_a_difference():
    assert [percent(relative) for relative in (0.877, 1.0, 1.2)] == ["-12.3 %", "+0.0 %", "+20.0 %"]


def test_the_headline_says_what_came_of_it():
    assert headline(PROGRESS) == "10.0 % less time a step: buckets=2"
    nothing = msgspec.structs.replace(PROGRESS, best=START)
    assert headline(nothing) == "nothing faster than the start so far"
    assert headline(msgspec.structs.replace(nothing, done=True)) == "nothing is faster than the start"


@pytest.mark.parametrize(("done", "end"), [(True, "has ended"), (False, "goes on with the next run")])
def test_the_summary_says_what_it_cost(done, end):
    text = summary(msgspec.structs.replace(PROGRESS, done=done))
    assert text == f"6 trials took 99 of 12,345 steps; one comparison is good to 2.1 %; the search {end}"


def test_the_fastest_of_each_choice_is_found():
    assert fastest(PROGRESS, "fusion_mb") == {32.0: pytest.approx(0.855), 8.0: 1.08}
    assert fastest(PROGRESS, "buckets") == {1: pytest.approx(0.855), 2: 0.9, 16: pytest.approx(5.4)}
    assert fastest(PROGRESS, "compression") == {"none": pytest.approx(0.855)}


def test_every_outcome_has_a_mark():
    assert set(MARKS) == set(Outcome)
    assert len(set(MARKS.values())) == len(Outcome)
