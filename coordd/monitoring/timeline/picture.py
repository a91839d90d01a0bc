"""Draws one step of all ranks as SVG: the breakdown of the main threads' time, and the operations in flight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from coordd.monitoring.timeline.breakdown import Breakdown, Part, comings, ways
from coordd.monitoring.timeline.journal import Journal, Operation
from coordd.monitoring.timeline.spans import Span, within
from coordd.monitoring.timeline.summary import Summary

__all__ = ["picture"]

_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 70, 15, 64
_MAIN, _LANE, _GAP = 26, 12, 16
_LANES = 8
"""Maximum number of concurrent operations drawn per rank, each in its own row."""
_TICKS = 8
_SHORTEST = 0.4  # pixels; shorter bars are not drawn
_STYLE = """
svg { font: 11px system-ui, sans-serif; background: #fff; } line { stroke: #dde3ea; }
text { fill: #6b7785; } text.title, text.rank { fill: #1d2733; } text.title { font-size: 15px; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  svg { background: #12171d; } line { stroke: #2d3742; }
  text { fill: #8b98a5; } text.title, text.rank { fill: #e6edf3; }
}
.compute { fill: #2f9e6e; } .late { fill: #d64545; } .negotiation { fill: #d9a441; } .transfer { fill: #3b7dd8; }
.rest { fill: #9aa5b1; } rect.thin { opacity: .45; }
"""


def picture(summary: Summary, journals: Sequence[Journal]) -> str:
    """Draws the step of median length."""
    step = summary.steps[summary.typical]
    since = min(one.step.since for one in step)
    return str(_Canvas(step, since, max(one.step.until for one in step), journals, number=summary.typical))


class _Canvas:
    """The SVG elements of a picture, collected from top to bottom."""

    def __init__(
        self, step: Sequence[Breakdown], since: float, until: float, journals: Sequence[Journal], *, number: int
    ) -> None:
        self._since = since
        self._scale = (_WIDTH - _LEFT - _RIGHT) / max(until - since, 1e-9)
        self._come = comings(journals)
        self._parts: list[str] = []
        self._y = _TOP
        title = f"step {number}: {1e3 * (until - since):.2f} ms on {len(step)} ranks"
        self._parts.append(f'<text class="title" x="{_LEFT}" y="20">{title}</text>')
        self._key()
        for one, journal in zip(step, journals, strict=True):
            self._rank(one, journal)
        self._parts[:0] = self._grid(until)

    def __str__(self) -> str:
        inside = "\n".join(self._parts)
        size = f'viewBox="0 0 {_WIDTH} {self._y}" width="{_WIDTH}" height="{self._y}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{_STYLE}</style>\n{inside}\n</svg>\n'
        )

    def _x(self, moment: float) -> float:
        return _LEFT + (moment - self._since) * self._scale

    def _key(self) -> None:
        x = _LEFT
        for part in Part:
            self._parts.append(f'<rect class="{_kind(part)}" x="{x}" y="32" width="10" height="10"/>')
            self._parts.append(f'<text x="{x + 14}" y="41">{part.value}</text>')
            x += 34 + 6 * len(part.value)
        self._parts.append(f'<text x="{x}" y="41">wide bars: the main thread; thin ones: operations</text>')

    def _rank(self, one: Breakdown, journal: Journal) -> None:
        self._parts.append(f'<text class="rank" x="8" y="{self._y + _MAIN - 9}">rank {one.rank}</text>')
        for piece in one.pieces:
            for span in piece.spans:
                self._bar(span, _kind(piece.part), _told(piece.part, piece.culprit), height=_MAIN)
        self._y += _MAIN + 2
        flying = [found for found in journal.operations if _overlaps(found, one)]
        lanes = 0
        for lane, operation in _in_lanes(flying):
            self._operation(operation, one, lane)
            lanes = max(lanes, lane + 1)
        self._y += lanes * _LANE + _GAP

    def _operation(self, found: Operation, one: Breakdown, lane: int) -> None:
        """Draws one operation: waiting for the last rank, negotiation, transfer."""
        more = f" and {len(found.names) - 1} more" if len(found.names) > 1 else ""
        hint = f"{found.kind} {found.names[0]}{more}, {found.nbytes} bytes"
        coming = self._come[found.key]
        for part, way in ways(found, coming).items():
            text = f"{hint}, {_told(part, coming.rank)}"
            for span in within([way], one.step.since, one.step.until):
                self._bar(span, f"{_kind(part)} thin", text, height=_LANE - 2, down=lane * _LANE)

    def _bar(self, span: Span, kind: str, hint: str, *, height: int, down: int = 0) -> None:
        since, until = span
        x, width = self._x(since), (until - since) * self._scale
        if width >= _SHORTEST:
            text = escape(f"{hint}: {1e3 * (until - since):.3f} ms")
            place = f'x="{x:.1f}" y="{self._y + down}" width="{width:.1f}" height="{height}"'
            self._parts.append(f'<rect class="{kind}" {place}><title>{text}</title></rect>')

    def _grid(self, until: float) -> Iterator[str]:
        span = 1e3 * (until - self._since)
        size = 10.0 ** math.floor(math.log10(max(span, 1e-3) / _TICKS))
        size *= next(factor for factor in (1, 2, 5, 10) if span / (size * factor) <= _TICKS)
        for number in range(int(span / size) + 1):
            x = self._x(self._since + number * size / 1e3)
            yield f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{self._y}"/>'
            yield f'<text x="{x:.1f}" y="{_TOP - 7}">{number * size:.6g} ms</text>'


def _kind(part: Part) -> str:
    return part.name.lower()


def _told(part: Part, culprit: int) -> str:
    return f"waiting for rank {culprit}" if part is Part.LATE else part.value


def _overlaps(operation: Operation, one: Breakdown) -> bool:
    return operation.come < one.step.until and operation.landed > one.step.since


def _in_lanes(flying: Sequence[Operation]) -> Iterator[tuple[int, Operation]]:
    """Yields each operation with a free lane; operations without a free lane are left out."""
    ends = [-math.inf] * _LANES
    for operation in flying:
        lane = next((lane for lane, end in enumerate(ends) if end <= operation.come), None)
        if lane is not None:
            ends[lane] = operation.landed
            yield lane, operation
