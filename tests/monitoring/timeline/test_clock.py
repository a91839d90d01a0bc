from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.monitoring.timeline.clock import Clock
from coordd.ops.messages import Pong

SKEWS = st.floats(-1e6, 1e6)
DELAYS = st.lists(st.tuples(st.floats(1e-6, 0.1), st.floats(1e-6, 0.1)), min_size=8, max_size=8)


def meet(clock, other, *, skew, delays, now=0.0):
    """Lets a clock ask another, which is ahead by ``skew``, until it knows; returns the reading and the time."""
    for there, back in delays:
        ping = clock.turn(now)
        assert ping is not None
        pong = other.answer(ping, now + there + skew)
        now += there + back
        if (reading := clock.hear(pong, now)) is not None:
            return reading, now
    raise AssertionError


@given(SKEWS, DELAYS)
def test_the_error_is_no_larger_than_it_is_said_to_be(skew, delays):
    reading, _ = meet(Clock(shared=False), Clock(shared=True), skew=skew, delays=delays)
    assert reading.offset == pytest.approx(skew, abs=reading.doubt + 1e-6)
    assert reading.doubt == pytest.approx(min(map(sum, delays)) / 2, abs=1e-9)


@given(SKEWS, SKEWS, DELAYS, DELAYS)
def test_time_is_handed_on_down_a_tree(skew, more, delays, others):
    leader, follower = Clock(shared=False), Clock(shared=False)
    first, _ = meet(leader, Clock(shared=True), skew=skew, delays=delays)
    second, _ = meet(follower, leader, skew=more, delays=others)
    assert second.offset == pytest.approx(skew + more, abs=first.doubt + second.doubt + 1e-6)


def test_who_does_not_know_does_not_answer():
    clock = Clock(shared=False)
    assert clock.answer(clock.turn(0.0), 5.0) is None


def test_what_is_not_answered_is_asked_again_and_an_old_answer_is_not_taken():
    clock = Clock(shared=False)
    first = clock.turn(0.0)
    assert clock.turn(0.5) is None
    second = clock.turn(clock.deadline)
    assert second.sent > first.sent
    assert clock.hear(Pong(first.sent, 99.0), 1.1) is None
    assert clock.turn(1.2) is None, "the second question is still open"


def test_after_a_round_a_minute_passes():
    clock = Clock(shared=False)
    _, now = meet(clock, Clock(shared=True), skew=3.0, delays=[(0.01, 0.01)] * 8)
    assert clock.turn(now + 59.0) is None
    assert clock.deadline == pytest.approx(now + 60.0)
    assert clock.turn(now + 60.0) is not None


def test_on_the_host_of_rank_0_nobody_asks():
    clock = Clock(shared=True)
    assert clock.deadline is None
    assert clock.turn(1e9) is None
    assert clock.reading.offset == 0.0
