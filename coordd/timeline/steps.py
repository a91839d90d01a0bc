"""Training steps, found by what repeats: a step has no mark of its own. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from coordd.timeline.journal import Journal

__all__ = ["Step", "anchor", "steps"]

_MUCH = 0.1


class Step(NamedTuple):
    """From the end of one step's last wait to the end of the next step's; ``key`` is the operation it is known by."""

    key: str
    since: float
    until: float


def anchor(journals: Sequence[Journal]) -> str | None:
    """The tensor that tells steps apart: of those that all ranks have and that carry much, the most frequent.

    Returns:
        its name; None if nothing comes twice.
    """
    count: Counter[str] = Counter()
    carried: Counter[str] = Counter()
    here = [{operation.key for operation in journal.operations} for journal in journals]
    everywhere = set.intersection(*here)  # not what some send to each other
    shared = (one for journal in journals for one in journal.operations if one.key in everywhere)
    for operation in shared:
        count.update(operation.names)
        carried.update(dict.fromkeys(operation.names, operation.nbytes // len(operation.names)))
    most = max(carried.values(), default=0)
    eligible = [name for name in count if carried[name] >= _MUCH * most]
    best = max(eligible, key=lambda name: count[name], default=None)
    return best if best is not None and count[best] > len(journals) else None


def steps(journal: Journal, name: str) -> list[Step]:
    """Cuts one rank's time where the last wait before the tensor comes ends, or, without one, where it comes."""
    marks = [operation for operation in journal.operations if name in operation.names]
    if not marks:
        return []
    ends = [wait.until for wait in journal.waits]
    comings = [mark.come for mark in marks]
    cuts = [_cut(ends, *between) for between in pairwise([-math.inf, *comings])]
    cuts.append(next((end for end in ends if end >= marks[-1].landed), marks[-1].landed))
    return [Step(mark.key, since, until) for mark, (since, until) in zip(marks, pairwise(cuts), strict=True)]


def _cut(ends: Sequence[float], after: float, until: float) -> float:
    """The last of ascending times in between, or the end."""
    place = bisect_right(ends, until)
    return ends[place - 1] if place and ends[place - 1] > after else until
