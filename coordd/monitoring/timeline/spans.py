"""Set operations on time intervals. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Span", "length", "minus", "union", "within"]

Span = tuple[float, float]
"""Start and end of an interval, in seconds."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Merges spans that overlap or touch; the result is ascending, without empty spans."""
    found: list[Span] = []
    for since, until in sorted(span for span in spans if span[0] < span[1]):
        if found and since <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], until)
        else:
            found.append((since, until))
    return found


def minus(spans: Iterable[Span], taken: Sequence[Span]) -> list[Span]:
    """Returns the parts of ``spans`` outside ``taken``; both are disjoint and ascending."""
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
    """Returns the parts of the spans between two times."""
    cut = ((max(start, since), min(stop, until)) for start, stop in spans)
    return [span for span in cut if span[0] < span[1]]


def length(spans: Iterable[Span]) -> float:
    """Returns the total length of the spans in seconds."""
    return sum(until - since for since, until in spans)
