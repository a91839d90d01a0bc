"""An SVG chart without a library: a percent axis, marks at horizontal places, and tooltips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Chart"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 34
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_LINES = 6
_HIGHEST = 1.35  # slower step times are drawn at the edge, because they would compress the rest of the chart


class Chart:
    """A chart of step times relative to the start (vertical) over places from 0 (horizontal)."""

    def __init__(self, width: int, height: int, *, places: int, values: Iterable[float]) -> None:
        """Creates a chart with axes only.

        Args:
            width: in pixels.
            height: in pixels.
            places: number of places on the horizontal axis.
            values: relative step times that determine the vertical range.
        """
        self._width, self._height, self._places = width, height, max(1, places)
        seen = [1.0, *values]
        low, high = min(seen), min(max(seen), _HIGHEST)
        margin = max(0.02, 0.08 * (high - low))
        self._low, self._high = low - margin, high + margin
        self._parts: list[str] = []
        self._grid()

    def __str__(self) -> str:
        """Returns the chart as an SVG element."""
        inside = "\n".join(self._parts)
        return f'<svg viewBox="0 0 {self._width} {self._height}" width="{self._width}" role="img">\n{inside}\n</svg>'

    def x(self, place: float) -> float:
        """Returns the horizontal position of the middle of a place, in pixels from the left."""
        return _LEFT + (place + 0.5) / self._places * (self._width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Returns the vertical position of a step time, in pixels from the top, clipped to the chart."""
        part = (min(max(value, self._low), self._high) - self._low) / (self._high - self._low)
        return self._height - _BOTTOM - part * (self._height - _TOP - _BOTTOM)

    def dot(self, place: float, value: float, *, kind: str, hint: str) -> None:
        """Draws a step time as a dot, or as an arrow if it lies above the chart."""
        x, y = self.x(place), self.y(value)
        title = f"<title>{escape(hint)}</title>"
        if value > self._high:
            corners = f"{x - 5:.1f},{y + 9:.1f} {x + 5:.1f},{y + 9:.1f} {x:.1f},{y:.1f}"
            self._parts.append(f'<polygon class="dot {kind}" points="{corners}">{title}</polygon>')
        else:
            self._parts.append(f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>')

    def span(self, place: float, values: Sequence[float], *, kind: str) -> None:
        """Draws a bar from the lowest to the highest of several step times."""
        self._line(self.x(place), self.y(min(values)), self.x(place), self.y(max(values)), f"span {kind}")

    def line(self, points: Iterable[tuple[float, float]]) -> None:
        """Draws a line through points of place and step time."""
        pixels = " ".join(f"{self.x(place):.1f},{self.y(value):.1f}" for place, value in points)
        self._parts.append(f'<polyline class="best" points="{pixels}"/>')

    def name(self, place: float, text: str, *, kind: str = "") -> None:
        """Writes a label below the axis at a place."""
        self._text(self.x(place), self._height - _BOTTOM + 16, text, f"name {kind}")

    def title(self, text: str) -> None:
        """Writes the title of the horizontal axis."""
        self._text((_LEFT + self._width - _RIGHT) / 2, self._height - 4, text, "title")

    def _grid(self) -> None:
        wide = self._high - self._low
        step = next((step for step in _STEPS if wide / step <= _LINES), 1.0)
        for number in range(math.ceil(self._low / step), math.floor(self._high / step) + 1):
            value = number * step
            self._line(_LEFT, self.y(value), self._width - _RIGHT, self.y(value), "start" if value == 1 else "grid")
            self._text(_LEFT - 6, self.y(value) + 4, f"{100 * value:.0f} %", "scale")

    def _line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def _text(self, x: float, y: float, text: str, kind: str) -> None:
        self._parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')
