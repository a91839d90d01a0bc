"""Which schedule is the best."""

from __future__ import annotations

from coordd.pipeline.outcome import Outcome
from coordd.pipeline.report import best

GPIPE, LEAN, FAST, STALE = (
    Outcome("gpipe", 33, 0.3, 8, 1),
    Outcome("1f1b", 33, 0.3, 4, 1),
    Outcome("interleaved", 28, 0.2, 6, 1),
    Outcome("2bw", 24, 0.0, 4, 2),
)
ALL = [GPIPE, LEAN, FAST, STALE]


def test_the_best_has_the_shortest_step_within_the_memory():
    flushing = ["gpipe", "1f1b", "interleaved"]
    assert best(ALL, flushing) is FAST
    assert best(ALL, flushing, memory=6) is FAST
    assert best(ALL, flushing, memory=5) is LEAN
    assert best(ALL, flushing, memory=3) is None


def test_of_equal_ones_it_keeps_least():
    assert best(ALL, ["gpipe", "1f1b"]) is LEAN
