from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.launch.termination import Ladder, Rung

OK = {"failed": False, "consequence": False}
CAUSE = {"failed": True, "consequence": False}
CONSEQUENCE = {"failed": True, "consequence": True}


def climbed(ladder: Ladder, now: float = 0.0) -> list[tuple[Rung, float]]:
    """Climbs to the top; each step with the time at which it is due."""
    steps = []
    while (due := ladder.due()) != math.inf:
        now = max(now, due)
        steps.append((ladder.climb(now), round(now, 3)))
    return steps


def test_nothing_is_due_while_all_is_well():
    ladder = Ladder(2, grace=5)
    ladder.end(1.0, **OK)
    assert ladder.due() == math.inf


def test_after_a_failure_the_job_has_ended_within_two_seconds():
    ladder = Ladder(2, grace=5)
    ladder.end(10.0, **CAUSE)
    assert ladder.rung == Rung.LISTEN
    assert climbed(ladder) == [(Rung.ASK, 10.6), (Rung.DISMISS, 10.9), (Rung.END, 11.2), (Rung.KILL, 11.6)]


def test_when_every_rank_has_spoken_there_is_nothing_to_wait_for():
    ladder = Ladder(2, grace=5)
    ladder.end(10.0, **CONSEQUENCE)
    ladder.end(10.1, **CAUSE)
    assert climbed(ladder)[:2] == [(Rung.ASK, 10.05), (Rung.DISMISS, 10.1)]


def test_a_rank_that_left_is_dismissed_when_all_have_ended_and_nobody_is_before():
    ladder = Ladder(2, grace=5)
    ladder.end(10.0, **OK, left=True)
    assert ladder.due() == math.inf
    ladder.end(60.0, **OK)
    assert climbed(ladder)[:2] == [(Rung.ASK, 60.05), (Rung.DISMISS, 60.1)]


def test_a_rank_that_left_is_a_cause_that_is_known():
    ladder = Ladder(3, grace=5)
    ladder.end(10.0, **OK, left=True)
    ladder.end(11.0, **CONSEQUENCE)
    assert ladder.due() == 11.6


def test_a_job_that_cannot_succeed_is_ended_like_a_failed_one():
    ladder = Ladder(3, grace=5)
    ladder.end(10.0, **OK)
    ladder.end_job(12.0)
    ladder.end_job(12.1)
    assert climbed(ladder)[:2] == [(Rung.ASK, 12.6), (Rung.DISMISS, 12.9)]


def test_the_end_of_a_job_that_has_failed_is_not_changed():
    ladder = Ladder(3, grace=5)
    ladder.end(10.0, **CAUSE)
    ladder.end_job(10.5)
    assert ladder.due() == 10.6


def test_a_consequence_waits_longer_for_its_cause():
    ladder = Ladder(3, grace=5)
    ladder.end(10.0, **CONSEQUENCE)
    assert ladder.due() == 11.0
    ladder.end(10.3, **CAUSE)
    assert ladder.due() == 10.6


def test_the_user_grants_grace_once():
    ladder = Ladder(2, grace=5)
    ladder.ask()
    assert ladder.due() == -math.inf
    assert ladder.climb(20.0) == Rung.ASK
    assert ladder.due() == 25.0
    ladder.ask()
    assert ladder.climb(21.0) == Rung.DISMISS
    assert ladder.due() == 21.3


def test_ranks_that_end_when_asked_are_dismissed_at_once():
    ladder = Ladder(2, grace=5)
    ladder.ask()
    ladder.climb(20.0)
    ladder.end(20.5, **CAUSE)
    assert ladder.due() == 25.0
    ladder.end(20.7, **CAUSE)
    assert ladder.due() <= 20.7
    assert ladder.climb(20.7) == Rung.DISMISS


def test_a_launcher_that_does_not_follow_its_ranks_is_ended():
    ladder = Ladder(1, grace=5)
    ladder.end(1.0, **OK)
    assert climbed(ladder) == [(Rung.END, 11.0), (Rung.KILL, 11.4)]


EVENTS = st.lists(st.sampled_from([OK, CAUSE, CONSEQUENCE, "ask", "climb"]), max_size=30)


@given(EVENTS, st.integers(1, 4), st.floats(0, 10))
def test_the_ladder_is_only_climbed_upwards_and_leads_to_the_top(events, size, grace):
    ladder = Ladder(size, grace=grace)
    now, rungs = 0.0, [Rung.RUN]
    for event in events:
        now += 0.2
        if event == "ask":
            ladder.ask()
        elif event == "climb":
            if ladder.due() <= now:
                ladder.climb(now)
        else:
            ladder.end(now, **event)
        rungs.append(ladder.rung)
    assert rungs == sorted(rungs)
    if ladder.rung != Rung.RUN:
        climbed(ladder, now)
        assert ladder.rung == Rung.KILL


@pytest.mark.parametrize("asks", [2, 3, 7])
def test_asking_again_and_again_kills_the_ranks_at_once(asks):
    ladder = Ladder(2, grace=60)
    for _ in range(asks):
        ladder.ask()
    assert ladder.climb(5.0) == Rung.DISMISS
    assert climbed(ladder) == [(Rung.END, 5.3), (Rung.KILL, 5.7)]
