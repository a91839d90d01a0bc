from __future__ import annotations

import math
import random

import pytest

from coordd.tuning.step_times import Pace


def paced(*steps: float, window: int = 6) -> Pace:
    pace = Pace(window)
    for seconds in steps:
        pace.add(seconds)
    return pace


def test_a_window_is_complete_when_it_is():
    pace = Pace(3)
    assert [pace.add(1.0) for _ in range(7)] == [False, False, True, False, False, True, False]


def test_a_pause_is_not_seen():
    assert paced(1, 1, 1, 60, 1, 1).latest == 1


def test_a_steady_drift_drops_out():
    pace = paced(*[1.0] * 6, *[1.21] * 6)
    assert pace.around == pytest.approx(1.1)


def test_it_is_known_after_enough_differences():
    assert not paced(*[1.0] * 41).known
    assert paced(*[1.0] * 42).known


def test_nothing_is_known_of_noise_before_two_windows():
    assert paced(*[1.0] * 6).noise == math.inf


def test_a_quiet_machine_is_not_taken_for_a_perfect_one():
    assert 0 < paced(*[1.0] * 60).noise < 0.01


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_noise_is_that_of_a_window_between_two(sigma):
    chance = random.Random(7)
    pace = paced(*(math.exp(chance.gauss(0, sigma)) for _ in range(6 * 33)))
    median_error = 1.25 * sigma / math.sqrt(6)
    assert pace.noise == pytest.approx(math.sqrt(1.5) * median_error, rel=0.4)


def test_pauses_make_no_noise():
    chance = random.Random(7)
    steps = [math.exp(chance.gauss(0, 0.02)) for _ in range(6 * 33)]
    paused = [seconds * (50 if place % 8 == 0 else 1) for place, seconds in enumerate(steps)]
    assert paced(*paused).noise < 2 * paced(*steps).noise
