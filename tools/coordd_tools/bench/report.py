"""The report: every figure with its spread, and every ratio that matters."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Figure", "Ratio", "Report", "Summary", "figures", "ratios"]


@dataclass(frozen=True)
class Summary:
    """The middle and the spread of ``n`` readings."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, readings: Sequence[float]) -> Summary:
        """Summarises readings; percentiles are interpolated.

        Raises:
            ValueError: there are none.
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
    """A figure's median over the same figure's of another engine; ``None`` where that other one is not positive."""

    subject: str
    engine: str
    against: str
    name: str
    value: float | None


@dataclass(frozen=True)
class Report:
    """All that one run found."""

    figures: tuple[Figure, ...]
    ratios: tuple[Ratio, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Every ``(subject, engine)``, subjects together, both in first-seen order."""
        seen = dict.fromkeys((figure.subject, figure.engine) for figure in self.figures)
        subjects = list(dict.fromkeys(subject for subject, _ in seen))
        return sorted(seen, key=lambda row: subjects.index(row[0]))

    def summary(self, subject: str, engine: str, name: str) -> Summary | None:
        """Looks a figure up; ``None`` where the engine has no such figure."""
        return next((f.summary for f in self.figures if (f.subject, f.engine, f.name) == (subject, engine, name)), None)

    def ratio(self, subject: str, engine: str, name: str, *, against: str) -> float | None:
        """Looks a ratio up; ``None`` where it was not formed or means nothing."""
        wanted = (subject, engine, name, against)
        return next((r.value for r in self.ratios if (r.subject, r.engine, r.name, r.against) == wanted), None)


def figures(name: str, readings: Mapping[tuple[str, str], Sequence[float]], *, scale: float = 1.0) -> list[Figure]:
    """Makes one figure of each engine's readings, multiplied by ``scale``."""
    return [
        Figure(subject, engine, name, Summary.of([scale * reading for reading in rounds]))
        for (subject, engine), rounds in readings.items()
    ]


def ratios(found: Iterable[Figure], name: str, *, against: str) -> list[Ratio]:
    """Divides each engine's median by that of one engine, subject by subject."""
    named = [figure for figure in found if figure.name == name]
    divisors = {figure.subject: figure.summary.median for figure in named if figure.engine == against}
    return [
        Ratio(figure.subject, figure.engine, against, name, _quotient(figure.summary.median, divisors[figure.subject]))
        for figure in named
        if figure.engine != against and figure.subject in divisors
    ]


def _quotient(value: float, divisor: float) -> float | None:
    return value / divisor if divisor > 0 else None
