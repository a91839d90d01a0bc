"""Stretches of time as a painter sees them: what was painted first stays, what comes later fills the gaps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Span", "length", "minus", "union", "within"]

Span = tuple[float, float]
"""From when till when."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Joins what overlaps or touches; ascending, without what is empty."""
    found: list[Span] = []
    for since, until in sorted(span for span in spans if span[0] < span[1]):
        if found and since <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], until)
        else:
            found.append((since, until))
    return found


def minus(spans: Iterable[Span], taken: Sequence[Span]) -> list[Span]:
    """What is left of disjoint, ascending spans outside others, which are disjoint and ascending, too."""
    found = []
    place = 0
    for since, until in spans:
        while place < len(taken) and taken[place][1] <= since:
            place += 1
        start, look = since, place
        while look < len(taken) and taken[look][0] < until:
            found.append((start, taken[look][0]))
            start = taken[look][1]
            look += 1
        found.append((start, until))
    return [span for span in found if span[0] < span[1]]


def within(spans: Iterable[Span], since: float, until: float) -> list[Span]:
    """What of the spans lies between two times."""
    cut = ((max(start, since), min(stop, until)) for start, stop in spans)
    return [span for span in cut if span[0] < span[1]]


def length(spans: Iterable[Span]) -> float:
    """Seconds in all."""
    return sum(until - since for since, until in spans)
