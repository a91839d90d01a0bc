"""Measures the pace of steps and its noise: windows of steps, compared by their medians.

A median ignores the pause of a checkpoint; the differences between consecutive windows measure the machine's noise, and
only a larger difference is one between settings.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

__all__ = ["Pace"]

_REMEMBERED = 32  # differences: long enough for a median, short enough to follow the machine
_NEEDED = 6
_QUIETEST = 0.003  # no machine is quieter than this for long
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_ABOUT_TWO = math.sqrt(3 / 4)  # one window against the mean of two has 3/4 of the variance of one against one


class Pace:
    """The pace of the settings in use, step by step. One change among many differences does not disturb it."""

    def __init__(self, window: int) -> None:
        """Starts without measurements.

        Args:
            window: steps in a window.
        """
        self._window = window
        self._open: list[float] = []
        self._medians: deque[float] = deque(maxlen=2)
        self._differences: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> bool:
        """Adds one step; returns whether it completes a window."""
        self._open.append(seconds)
        if len(self._open) < self._window:
            return False
        if self._medians:
            self._differences.append(abs(median(self._open) / self._medians[-1] - 1))
        self._medians.append(median(self._open))
        self._open.clear()
        return True

    @property
    def latest(self) -> float:
        """Median seconds per step of the last window; there must have been one."""
        return self._medians[-1]

    @property
    def around(self) -> float:
        """Seconds per step halfway between the last two windows, so that a steady drift cancels out."""
        return math.sqrt(self._medians[0] * self._medians[-1])

    @property
    def known(self) -> bool:
        """Whether there are enough differences to estimate the noise."""
        return len(self._differences) >= _NEEDED

    @property
    def noise(self) -> float:
        """Relative standard deviation of a window against the noise-free value, estimated from its neighbours."""
        if not self._differences:
            return math.inf
        return max(_QUIETEST, _SIGMA * _ABOUT_TWO * median(self._differences))
