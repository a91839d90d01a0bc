"""Formats the settings and results of a search, for pictures and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from coordd.tuning.autotune import Outcome, Progress
from coordd.tuning.settings import Settings

__all__ = ["MARKS", "changes", "fastest", "headline", "percent", "summary", "told", "word"]

MARKS = {Outcome.FASTER: "✓", Outcome.NO_GAIN: "·", Outcome.UNCLEAR: "?", Outcome.OPEN: "…"}


def changes(settings: Settings, start: Settings) -> str:
    """Formats the settings that differ from the start, as in ``cycle_ms=0 buckets=2``."""
    before = msgspec.structs.asdict(start)
    after = msgspec.structs.asdict(settings)
    return told({knob: value for knob, value in after.items() if value != before[knob]}) or "as at the start"


def told(values: Mapping[str, float | str]) -> str:
    """Formats knobs and their values."""
    return " ".join(f"{knob}={word(value)}" for knob, value in values.items())


def word(value: float | str) -> str:
    """Formats one value."""
    return value if isinstance(value, str) else f"{value:g}"


def fastest(progress: Progress, knob: str) -> dict[float | str, float]:
    """Returns the lowest step time, relative to the start, of each choice of a knob that was tried."""
    found: dict[float | str, float] = {getattr(progress.start, knob): 1.0}
    for trial in progress.trials:
        if trial.ratios:
            choice = getattr(trial.settings, knob)
            found[choice] = min(trial.relative, found.get(choice, math.inf))
    return found


def percent(relative: float) -> str:
    """Formats a step time relative to the start as a difference, as in ``-12.3 %``."""
    return f"{100 * (relative - 1):+.1f} %"


def headline(progress: Progress) -> str:
    """Returns the result of the search so far, in one line."""
    if progress.best == progress.start:
        return "nothing faster than the start so far" if not progress.done else "nothing is faster than the start"
    return f"{100 * (1 - progress.relative):.1f} % less time a step: {changes(progress.best, progress.start)}"


def summary(progress: Progress) -> str:
    """Returns the cost and the state of the search, in one line."""
    state = "the search has ended" if progress.done else "the search goes on with the next run"
    noise = f"; one comparison is good to {100 * progress.noise:.1f} %" if progress.noise else ""
    return f"{len(progress.trials)} trials took {progress.spent:,} of {progress.steps:,} steps{noise}; {state}"
