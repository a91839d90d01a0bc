"""Summarizes the steps of all ranks: the breakdown of their time, and the ranks that came last. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

from coordd.monitoring.timeline.breakdown import Breakdown, Coming, Part, breakdowns, comings
from coordd.monitoring.timeline.journal import Journal
from coordd.monitoring.timeline.spans import length
from coordd.monitoring.timeline.steps import anchor, steps

__all__ = ["Lateness", "Share", "Summary", "summarize"]


class Share(NamedTuple):
    """One rank's average step over the middle steps, in seconds: its duration, and the time per category."""

    rank: int
    seconds: float
    spent: Mapping[Part, float]

    @property
    def exposed(self) -> float:
        """Seconds of communication that compute did not hide."""
        return self.seconds - self.spent[Part.COMPUTE]


class Lateness(NamedTuple):
    """How often one rank came last, and the cost of that.

    ``times`` is the number of operations, ``share`` their fraction, ``behind`` the median delay after the rank before
    it, and ``cost`` the waiting time per step, summed over the other ranks; both in seconds.
    """

    rank: int
    times: int
    share: float
    behind: float
    cost: float


class Summary(NamedTuple):
    """The summary of a timeline.

    ``steps`` are the breakdowns by rank of each step that all ranks have; ``middle`` the numbers of the steps whose
    length is in the middle half, over which the averages are taken; ``typical`` is the number of the step of median
    length.
    """

    anchor: str
    steps: list[list[Breakdown]]
    middle: list[int]
    typical: int
    shares: list[Share]
    late: list[Lateness]

    @property
    def seconds(self) -> float:
        """Average duration of a step in seconds."""
        return mean(share.seconds for share in self.shares)

    def spent(self, part: Part) -> float:
        """Returns the seconds per step of a category, averaged over the ranks."""
        return mean(share.spent[part] for share in self.shares)


def summarize(journals: Sequence[Journal], name: str | None = None) -> Summary | None:
    """Breaks all steps down and summarizes them.

    Args:
        journals: one per rank.
        name: the tensor that marks steps; by default the choice of `anchor`.

    Returns:
        the summary; None if no step is found on all ranks.
    """
    name = name or anchor(journals)
    if name is None:
        return None
    come = comings(journals)
    by_rank = [{one.step.key: one for one in breakdowns(journal, steps(journal, name), come)} for journal in journals]
    keys = [key for key in by_rank[0] if all(key in found for found in by_rank)]
    if not keys:
        return None
    rows = [[found[key] for found in by_rank] for key in keys]
    order = sorted(range(len(rows)), key=lambda number: mean(one.seconds for one in rows[number]))
    middle = order[len(order) // 4 : len(order) - len(order) // 4]
    shares = [_share([rows[number][place] for number in middle]) for place in range(len(journals))]
    since, until = rows[0][0].step.since, rows[-1][0].step.until
    # Operations before the first step do not count.
    there = [coming for coming in come.values() if since <= coming.at <= until]
    late = _late(there, [one for number in middle for one in rows[number]], steps=len(middle))
    return Summary(name, rows, sorted(middle), order[len(order) // 2], shares, late)


def _share(found: Sequence[Breakdown]) -> Share:
    spent = {part: mean(one.spent(part) for one in found) for part in Part}
    return Share(found[0].rank, mean(one.seconds for one in found), spent)


def _late(come: Iterable[Coming], found: Iterable[Breakdown], *, steps: int) -> list[Lateness]:
    """Counts how often each rank came last; the rank with the highest cost comes first."""
    behind: defaultdict[int, list[float]] = defaultdict(list)
    for coming in come:
        if coming.rank >= 0:
            behind[coming.rank].append(coming.behind)
    lost: defaultdict[int, float] = defaultdict(float)
    for one in found:
        for piece in one.pieces:
            if piece.part is Part.LATE:
                lost[piece.culprit] += length(piece.spans)
    total = sum(map(len, behind.values()))
    rows = [
        Lateness(rank, len(times), len(times) / total, median(times), lost[rank] / steps)
        for rank, times in behind.items()
    ]
    return sorted(rows, key=lambda row: (-row.cost, -row.times))
