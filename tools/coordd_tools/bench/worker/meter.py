"""Measures the wall time of each call, and the CPU time and context switches of the whole process, all threads."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from coordd_tools.bench.blocks import Block

__all__ = ["read"]


def read(call: Callable[[], object], calls: int, *, subject: str, engine: str) -> Block:
    """Makes the calls, one after the other, and returns the readings as a block.

    Wall times are per call; CPU seconds and voluntary context switches are totals of all calls.
    """
    clock = time.perf_counter
    seconds = []
    switches = _switches()
    cpu = time.process_time()
    for _ in range(calls):
        begin = clock()
        call()
        seconds.append(clock() - begin)
    cpu = time.process_time() - cpu
    return Block(subject, engine, tuple(seconds), cpu, _switches() - switches)


def _switches() -> int:
    """Returns how often a thread of this process has gone to sleep; each sleep ended with a wake-up."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
