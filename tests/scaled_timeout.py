"""Limits for what may hang, which a busy machine does not reach sooner than an idle one."""

from __future__ import annotations

import os
import time

__all__ = ["MAX_SLOWDOWN", "ScaledTimeout"]

MAX_SLOWDOWN = 5.0
"""The largest factor by which load stretches a limit."""

_LOAD = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)  # kept open for tests that leave no free file descriptor


class ScaledTimeout:
    """A limit in seconds of an idle machine: where three processes want a core, they pass at a third of their speed."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def next_wait(self) -> float:
        """Returns for how many seconds to wait now, one at most; 0 when the limit is reached."""
        now = time.monotonic()
        self._left -= (now - self._looked) * _share_of_a_core()
        self._looked = now
        return min(1.0, max(0.0, self._left))

    def shorten(self, seconds: float) -> None:
        """Leaves so many seconds at most."""
        self._left = min(self._left, seconds)


def _share_of_a_core() -> float:
    runnable = int(os.pread(_LOAD, 256, 0).split()[3].partition(b"/")[0])
    return min(1.0, max(len(os.sched_getaffinity(0)) / runnable, 1 / MAX_SLOWDOWN))
