"""The report: all figures with their spread, and the ratios of interest."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Figure", "Ratio", "Report", "Summary", "figures", "ratios"]


@dataclass(frozen=True)
class Summary:
    """Median, 10th and 90th percentile of ``n`` readings."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, readings: Sequence[float]) -> Summary:
        """Summarizes readings; percentiles are interpolated.

        Raises:
            ValueError: there are no readings.
        """
        if not readings:
            raise ValueError("no readings to summarise")
        deciles = statistics.quantiles(readings, n=10, method="inclusive") if len(readings) > 1 else [readings[0]] * 9
        return cls(median=deciles[4], p10=deciles[0], p90=deciles[8], n=len(readings))


@dataclass(frozen=True)
class Figure:
    """One measured quantity of one engine; its unit ends the name, as in ``step_ms``."""

    subject: str
    engine: str
    name: str
    summary: Summary


@dataclass(frozen=True)
class Ratio:
    """A figure's median over that of another engine; ``None`` if the latter is not positive."""

    subject: str
    engine: str
    against: str
    name: str
    value: float | None


@dataclass(frozen=True)
class Report:
    """All figures and ratios of one run."""

    figures: tuple[Figure, ...]
    ratios: tuple[Ratio, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Returns every ``(subject, engine)``, grouped by subject, both in first-seen order."""
        seen = dict.fromkeys((figure.subject, figure.engine) for figure in self.figures)
        subjects = list(dict.fromkeys(subject for subject, _ in seen))
        return sorted(seen, key=lambda row: subjects.index(row[0]))

    def summary(self, subject: str, engine: str, name: str) -> Summary | None:
        """Returns a figure's summary; ``None`` if the engine has no such figure."""
        return next((f.summary for f in self.figures if (f.subject, f.engine, f.name) == (subject, engine, name)), None)

    def ratio(self, subject: str, engine: str, name: str, *, against: str) -> float | None:
        """Returns a ratio; ``None`` if it was not computed or is undefined."""
        wanted = (subject, engine, name, against)
        return next((r.value for r in self.ratios if (r.subject, r.engine, r.name, r.against) == wanted), None)


def figures(name: str, readings: Mapping[tuple[str, str], Sequence[float]], *, scale: float = 1.0) -> list[Figure]:
    """Returns one figure for each engine's readings, multiplied by ``scale``."""
    return [
        Figure(subject, engine, name, Summary.of([scale * reading for reading in rounds]))
        for (subject, engine), rounds in readings.items()
    ]


def ratios(found: Iterable[Figure], name: str, *, against: str) -> list[Ratio]:
    """Divides each engine's median by that of one engine, for each subject."""
    named = [figure for figure in found if figure.name == name]
    divisors = {figure.subject: figure.summary.median for figure in named if figure.engine == against}
    return [
        Ratio(figure.subject, figure.engine, against, name, _quotient(figure.summary.median, divisors[figure.subject]))
        for figure in named
        if figure.engine != against and figure.subject in divisors
    ]


def _quotient(value: float, divisor: float) -> float | None:
    return value / divisor if divisor > 0 else None
