"""Draws schedules as SVG pictures: a lane for each rank, a box for each pass, idle time in between. Pure.

A plan of many ranks or passes is drawn with lanes that stand for several ranks, and cells that stand for several
passes, so that every picture stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from coordd.pipeline.action import COMPUTE, Action, Kind
from coordd.pipeline.lanes import Busy, busy, lanes, name
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Span, Timeline
from coordd.pipeline.units import Units

__all__ = ["WORDS", "draw"]

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward of inputs",
    Kind.WEIGHT: "backward of weights",
}
"""The kinds of passes, in words."""

_ORDER = tuple(WORDS)

# From the palette of Okabe and Ito, which is distinguishable with any kind of colour vision.
_COLOURS = {
    Kind.FORWARD: (0x00, 0x72, 0xB2),
    Kind.BACKWARD: (0xE6, 0x9F, 0x00),
    Kind.INPUT: (0xCC, 0x79, 0xA7),
    Kind.WEIGHT: (0x00, 0x9E, 0x73),
}
_DARK, _IDLE, _LINE = "#1d2733", "#eef1f4", "#c9d1d9"
_PALEST = 0.6
"""The fraction of white in the colour of a rank's last chunk."""

_Pair = tuple[float, float]

_WIDTH, _MARGIN, _TOP = 1080, 16, 78
_LABEL, _LETTER = 6.4, 5.8
_TICKS = 10
_LANES, _BOXES = 64, 4000
_CELLS, _COLUMNS, _SHADES = 10_000, 420, 6
_FAINT = 0.25
_ROOM = 2
"""Pixels around a number in its box."""


def draw(
    plan: Plan, timeline: Timeline, *, title: str = "", measured: Timeline | None = None, units: Units | None = None
) -> str:
    """Draws the timeline of a plan.

    Args:
        plan: the plan.
        timeline: its predicted times, from `simulate`.
        title: heading; by default the schedule and its sizes.
        measured: the measured timeline; drawn below, on the same scale.
        units: of the times and peaks; seconds and bytes by default.
    """
    panels = {"": timeline} if measured is None else {"predicted": timeline, "measured": measured}
    steps = [span.end for panel in panels.values() for mine in panel.steps for span in mine]
    until = max([panel.makespan for panel in panels.values()] + steps)
    passes = max(sum(map(len, panel.spans)) for panel in panels.values())
    canvas = _Canvas(plan, units or Units(), until, small=len(plan.actions) <= _LANES and passes <= _BOXES)
    canvas.head(title or _title(plan))
    for heading, panel in panels.items():
        canvas.panel(heading, panel)
    return canvas.svg()


def _title(plan: Plan) -> str:
    return f"{plan.name}: {len(plan.actions)} ranks, {plan.stages} stages, {plan.microbatches} microbatches"


@dataclass
class _Canvas:
    """A picture, built from the top down."""

    plan: Plan
    units: Units
    until: float
    small: bool
    y: float = _TOP
    parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lanes = lanes(self.plan, _LANES)
        self._left = 2 * _MARGIN + _LABEL * max(len(name(lane)) for lane in self._lanes)
        self._scale = (_WIDTH - self._left - _MARGIN) / (self.until or 1.0)
        self._height = max(11, min(26, 520 // len(self._lanes)))
        self._chunks = [{stage: chunk for chunk, stage in enumerate(held)} for held in self.plan.held]
        self._most = max(map(len, self._chunks))
        self._last = set(_before_steps(self.plan)) if self.small else set()

    def head(self, title: str) -> None:
        """Writes the title and the legend."""
        self._text(_MARGIN, 26, title, f'font-size="16" font-weight="600" fill="{_DARK}"')
        x: float = _MARGIN
        used = {action.kind for actions in self.plan.actions[:_LANES] for action in actions}
        swatches = self._most if self.small else 1
        for kind in (kind for kind in WORDS if kind in used):
            for chunk in range(swatches):
                self._box((x, 41), (11, 11), fill=_colour(kind, chunk, swatches))
                x += 11
            x = self._text(x + 5, 51, WORDS[kind]) + 16
        self._box((x, 41), (11, 11), fill=_IDLE, more=f' stroke="{_LINE}"')
        x = self._text(x + 16, 51, "idle") + 16
        if self.small:
            self._mark(x, 40, 13)
            x = self._text(x + 6, 51, "weights change") + 16
        self._text(x, 51, self._hint())

    def _hint(self) -> str:
        if not self.small:
            many = sorted({len(lane) for lane in self._lanes})
            lane = f"a lane is of {' or '.join(map(str, many))} ranks; " if many[-1] > 1 else ""
            return f"{lane}the paler, the fewer passes; colours share a cell as kinds share the work"
        numbers = "numbers: microbatches"
        return f"{numbers}; the paler, the later the rank's stage" if self._most > 1 else numbers

    def panel(self, heading: str, timeline: Timeline) -> None:
        """Draws a timeline below the existing content."""
        peak = self.units.size(max(timeline.peaks, default=0.0))
        told = f"makespan {self.units.span(timeline.makespan)}, bubble {100 * timeline.bubble:.1f} %, peak {peak}"
        told += f", {self.units.span(timeline.step)} to change the weights" if timeline.steps else ""
        self._text(_MARGIN, self.y, f"{heading}: {told}" if heading else told, f'font-size="13" fill="{_DARK}"')
        top = self.y + 30
        bottom = top + self._height * len(self._lanes)
        self._axis(top, bottom)
        for place, lane in enumerate(self._lanes):
            y = top + place * self._height
            self._box((self._left, y), (timeline.makespan * self._scale, self._height - 1), fill=_IDLE)
            self._text(_MARGIN, y + self._height / 2 + 3.5, name(lane))
        if self.small:
            for rank, spans in enumerate(timeline.spans):
                self._passes(rank, spans, top + rank * self._height)
            for rank, spans in enumerate(timeline.steps):
                self._steps(rank, spans, top + rank * self._height)
        else:
            self._cells(timeline, top)
        self.y = bottom + 34

    def _axis(self, top: float, bottom: float) -> None:
        length, unit = self.units.clock(self.until)
        for tick in _ticks(self.until / length):
            x = self._left + tick * length * self._scale
            self.parts.append(f'<path d="M{x:.1f} {top - 4:.1f}V{bottom:.1f}" stroke="{_LINE}"/>')
            self._text(x, top - 8, f"{tick:.6g} {unit}" if tick == 0 else f"{tick:.6g}", 'text-anchor="middle"')

    def _passes(self, rank: int, spans: Sequence[Span], y: float) -> None:
        for action, begin, end in spans:
            x, width = self._left + begin * self._scale, (end - begin) * self._scale
            fill = _colour(action.kind, self._chunks[rank].get(action.stage, 0), self._most)
            hint = f"{action}, rank {rank}: {self.units.span(begin)} to {self.units.span(end)}"
            self._box((x, y), (max(width - 0.6, 0.4), self._height - 1), fill=fill, hint=hint)
            if action in self._last:
                self._mark(x + width - 1, y, self._height - 1)
            number = str(action.microbatch)
            if width >= _LETTER * len(number) + _ROOM:
                ink = f'text-anchor="middle" fill="{_ink(fill)}" pointer-events="none"'
                self._text(x + width / 2, y + self._height / 2 + 3.5, number, ink)

    def _steps(self, rank: int, spans: Sequence[Span], y: float) -> None:
        for action, begin, end in spans:
            hint = f"{action}, rank {rank}: {self.units.span(begin)} to {self.units.span(end)}"
            corner, width = (self._left + begin * self._scale, y), (end - begin) * self._scale
            self._box(corner, (max(width, 0.4), self._height - 1), fill=_DARK, hint=hint)

    def _cells(self, timeline: Timeline, top: float) -> None:
        """Draws one path for each kind and shade, with all its cells."""
        paths: dict[tuple[Kind, int], list[str]] = {}
        cells = min(_COLUMNS, _CELLS // len(self._lanes))
        wide = self.until * self._scale / cells
        for place, row in enumerate(busy(timeline, self._lanes, cells=cells, until=self.until)):
            y = top + place * self._height
            for cell, length, found in _runs(row):
                down = y
                shade = math.ceil(min(1.0, sum(found.values())) * _SHADES)
                for kind in sorted(found, key=_ORDER.index):
                    tall = (self._height - 1) * found[kind] / sum(found.values())
                    x, end = self._left + cell * wide, self._left + (cell + length) * wide
                    box = f"M{x:.1f} {down:.1f}H{end:.1f}v{tall:.1f}H{x:.1f}z"
                    paths.setdefault((kind, shade), []).append(box)
                    down += tall
        for (kind, shade), boxes in sorted(paths.items()):
            opacity = _FAINT + (1 - _FAINT) * shade / _SHADES
            look = f'fill="{_colour(kind, 0, 1)}" fill-opacity="{opacity:.2f}" shape-rendering="crispEdges"'
            self.parts.append(f'<path {look} d="{"".join(boxes)}"/>')

    def _box(self, corner: _Pair, size: _Pair, *, fill: str, hint: str = "", more: str = "") -> None:
        place = 'x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"'.format(*corner, *size)
        rect = f'<rect {place} fill="{fill}"{more}'
        self.parts.append(f"{rect}><title>{escape(hint)}</title></rect>" if hint else f"{rect}/>")

    def _mark(self, x: float, y: float, height: float) -> None:
        self.parts.append(f'<path d="M{x:.1f} {y:.1f}v{height:.1f}" stroke="{_DARK}" stroke-width="2"/>')

    def _text(self, x: float, y: float, text: str, more: str = "") -> float:
        """Writes a text, and returns approximately where it ends."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{more and " " + more}>{escape(text)}</text>')
        return x + _LETTER * len(text)

    def svg(self) -> str:
        """Returns the whole picture."""
        height = math.ceil(self.y - 12)
        size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        look = 'font-family="system-ui, sans-serif" font-size="11" fill="#57606a"'
        inside = "\n".join([f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#fff"/>', *self.parts])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look} role="img">\n{inside}\n</svg>\n'


def _before_steps(plan: Plan) -> Iterator[Action]:
    """Yields the passes after which weights change."""
    for actions in plan.actions:
        last: Action | None = None
        for action in actions:
            if action.kind in COMPUTE:
                last = action
            elif action.kind is Kind.STEP and last is not None:
                yield last


def _runs(row: Sequence[Busy]) -> Iterator[tuple[int, int, Busy]]:
    """Yields runs of equal, non-idle cells: first cell, length, content."""
    begin = 0
    for cell in range(1, len(row) + 1):
        if cell == len(row) or row[cell] != row[begin]:
            if row[begin]:
                yield begin, cell - begin, row[begin]
            begin = cell


def _ticks(until: float) -> list[float]:
    if not until > 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(until / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if until / (step * factor) <= _TICKS)
    return [number * step for number in range(int(until / step + 1e-9) + 1)]


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    white = _PALEST * chunk / max(1, chunks - 1)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _COLOURS[kind])


def _ink(fill: str) -> str:
    """Returns black or white, whichever is readable on a colour."""
    red, green, blue = (int(fill[place : place + 2], 16) for place in (1, 3, 5))
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "#fff"
