"""Finds training steps by a tensor that repeats, because the timeline does not mark steps. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from coordd.monitoring.timeline.journal import Journal

__all__ = ["Step", "anchor", "steps"]

_MUCH = 0.1


class Step(NamedTuple):
    """The time from the end of the previous step's last wait to the end of this step's; ``key`` is its operation."""

    key: str
    since: float
    until: float


def anchor(journals: Sequence[Journal]) -> str | None:
    """Selects the tensor that marks steps: the most frequent one of the large tensors that all ranks have.

    Large means at least ``_MUCH`` times the size of the largest.

    Returns:
        its name; None if no such tensor repeats.
    """
    count: Counter[str] = Counter()
    carried: Counter[str] = Counter()
    here = [{operation.key for operation in journal.operations} for journal in journals]
    everywhere = set.intersection(*here)  # excludes sends and receives between some of the ranks
    shared = (one for journal in journals for one in journal.operations if one.key in everywhere)
    for operation in shared:
        count.update(operation.names)
        carried.update(dict.fromkeys(operation.names, operation.nbytes // len(operation.names)))
    most = max(carried.values(), default=0)
    eligible = [name for name in count if carried[name] >= _MUCH * most]
    best = max(eligible, key=lambda name: count[name], default=None)
    return best if best is not None and count[best] > len(journals) else None


def steps(journal: Journal, name: str) -> list[Step]:
    """Splits one rank's time at the end of the last wait before each submission of the tensor.

    If there is no wait since the previous submission, the cut is at the submission itself.
    """
    marks = [operation for operation in journal.operations if name in operation.names]
    if not marks:
        return []
    ends = [wait.until for wait in journal.waits]
    comings = [mark.come for mark in marks]
    cuts = [_cut(ends, *between) for between in pairwise([-math.inf, *comings])]
    cuts.append(next((end for end in ends if end >= marks[-1].landed), marks[-1].landed))
    return [Step(mark.key, since, until) for mark, (since, until) in zip(marks, pairwise(cuts), strict=True)]


def _cut(ends: Sequence[float], after: float, until: float) -> float:
    """Returns the last of ascending times in (``after``, ``until``], or ``until`` if there is none."""
    place = bisect_right(ends, until)
    return ends[place - 1] if place and ends[place - 1] > after else until
