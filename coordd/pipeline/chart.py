"""Draws schedules with letters, for terminals with and without colours. Pure.

::

    rank 0 F0F1..B0--F2B1--B2--
    rank 1 ..F0B0--F1B1--F2B2--
"""

from __future__ import annotations

from collections.abc import Sequence

from coordd.pipeline.action import Kind
from coordd.pipeline.lanes import Busy, busy, lanes, name
from coordd.pipeline.picture import WORDS
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Span, Timeline

__all__ = ["IDLE", "chart"]

IDLE = "."
_REST = {Kind.FORWARD: "_", Kind.BACKWARD: "-", Kind.INPUT: "~", Kind.WEIGHT: "+"}
"""Fills the columns of a pass after its letter and its microbatch."""

_LANES = 32
_EVEN = 2
"""Columns per pass from which passes of equal length get equal numbers of columns."""


def chart(plan: Plan, timeline: Timeline, width: int) -> str:
    """Draws the timeline of a plan in lines of at most ``width`` characters, with a legend.

    Where passes are too short, or ranks too many, a character shows the kind of pass that took most of the time in its
    column: a capital if the ranks computed for at least half of it, a small letter if they were idle for longer.
    """
    cut = lanes(plan, _LANES)
    names = [name(lane) for lane in cut]
    left = max(map(len, names)) + 1
    columns = max(1, width - left)
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    each = _shortest(timeline) * scale if len(cut) == len(timeline.spans) else 0.0
    if each >= 1:
        scale *= int(each) / each if each >= _EVEN else 1.0
        rows = [_passes(spans, scale, round(timeline.makespan * scale)) for spans in timeline.spans]
    else:
        rows = [_cells(row) for row in busy(timeline, cut, cells=columns, until=timeline.makespan)]
    drawn = [f"{name:<{left}}{row}" for name, row in zip(names, rows, strict=True)]
    return "\n".join([*drawn, _legend(plan, coarse=each < 1)])


def _legend(plan: Plan, *, coarse: bool) -> str:
    used = {action.kind for actions in plan.actions[:_LANES] for action in actions}
    told = [f"{kind.value} {word}" for kind, word in WORDS.items() if kind in used]
    return ", ".join([*told, f"{IDLE} idle"]) + ("; a small letter: idle for the most part" if coarse else "")


def _shortest(timeline: Timeline) -> float:
    lengths = (span.end - span.begin for spans in timeline.spans for span in spans)
    return min((length for length in lengths if length > 0), default=0.0)


def _passes(spans: Sequence[Span], scale: float, columns: int) -> str:
    row = ""
    for (_, kind, microbatch, _), begin, end in spans:
        since, to = round(begin * scale), round(end * scale)
        text = f"{kind.value}{microbatch}" if to - since > len(str(microbatch)) else kind.value
        row = row.ljust(since, IDLE) + text[: to - since].ljust(to - since, _REST[kind])
    return row.ljust(columns, IDLE)


def _cells(row: Sequence[Busy]) -> str:
    return "".join(map(_letter, row))


def _letter(found: Busy) -> str:
    if not found:
        return IDLE
    kind = max(found, key=lambda kind: (found[kind], kind))
    return kind.value if sum(found.values()) >= 0.5 else kind.value.lower()
