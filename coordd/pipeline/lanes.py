"""Groups ranks into the lanes of a drawing, and computes how busy they are: any plan becomes drawable. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordd.errors import spans
from coordd.pipeline.action import Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Timeline

__all__ = ["Busy", "busy", "lanes", "name"]

Busy = dict[Kind, float]
"""The fraction of the time of a lane's ranks that each kind of pass takes."""


def lanes(plan: Plan, most: int) -> list[range]:
    """Cuts the ranks of a plan into at most ``most`` runs.

    The runs have equal lengths and one replica each if a number of runs between half of ``most`` and ``most`` allows
    it.
    """
    ranks, replicas = len(plan.actions), max(map(len, plan.placement))
    fair = (count for count in range(most, most // 2, -1) if ranks % count == 0 and count % replicas == 0)
    count = min(ranks, next(fair, most)) if ranks > most else ranks
    bounds = [ranks * lane // count for lane in range(count + 1)]
    return [range(bounds[lane], bounds[lane + 1]) for lane in range(count)]


def name(lane: range) -> str:
    """Returns a lane's label, its ranks."""
    return f"rank{'s' * (len(lane) > 1)} {spans(lane)}"


def busy(timeline: Timeline, cut: Sequence[range], *, cells: int, until: float) -> list[list[Busy]]:
    """Cuts the time into cells of equal length, and returns for each lane what its ranks do in each cell.

    Args:
        timeline: the passes and their times.
        cut: the lanes.
        cells: number of cells.
        until: end of the last cell.
    """
    found: list[list[Busy]] = [[{} for _ in range(cells)] for _ in cut]
    scale = cells / until if until else 0.0
    for lane, row in zip(cut, found, strict=True):
        for rank in lane:
            for (_, kind, _, _), begin, end in timeline.spans[rank]:
                since, to = begin * scale, end * scale
                for cell in range(int(since), min(int(to) + 1, cells)):
                    part = (min(to, cell + 1) - max(since, cell)) / len(lane)
                    if part > 0:
                        row[cell][kind] = row[cell].get(kind, 0.0) + part
    return found
