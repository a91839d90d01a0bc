"""Ten thousand steps with names, shapes and sets that come and go: the tables stay as small as they were."""

from __future__ import annotations

from random import Random

import pytest

from coordd.ops.messages import Request
from coordd_tools.sim.caches import leftovers
from tests.star import Star, allreduce, outcome

STEPS = 10_000
WARM = 2000
SETS = ((), (0, 1), (1, 2), (0,))


def requests(rng: Random, step: int) -> list[Request]:
    """What all members submit in a step; rank 2 seldom has anything to do, so it says little."""
    busy = rng.choice(SETS) if step % 500 == 0 else rng.choice(((0, 1), (0,)))
    return [
        allreduce(f"w{rng.randrange(7)}", rng.randrange(3), members=busy),
        allreduce(f"once{step}", transient=True, members=(0, 1)),
        allreduce(f"new{step}", members=(1,)),
    ]


@pytest.mark.parametrize("capacity", [0, 3, 64])
def test_memory_is_flat(capacity):
    rng, star = Random(capacity), Star(3, cache=capacity)
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    messages = 0
    for step in range(STEPS):
        handles = [
            star.submit(rank, request, line=rng.randrange(2))
            for request in requests(rng, step)
            for rank in request.members or star.ranks
        ]
        reports = [star.report(rank) for rank in star.ranks]
        messages += sum(report is not None for report in reports) + len(star.ranks)
        star.settle()
        assert all(outcome(handle) == "done" for handle in handles)
        most = before if step < WARM else after
        for table, count in sizes(star).items():
            most[table] = max(most.get(table, 0), count)
    assert all(after[table] <= 1.2 * before[table] for table in after), (before, after)
    assert messages <= 2 * len(star.ranks) * STEPS


def sizes(star: Star) -> dict[str, int]:
    """Everything that the coordinator and the members keep from step to step."""
    found = leftovers(star.coordinator)
    for member in star.members:
        found[f"entries of rank {member.rank}"] = len(member.table)
        found[f"cache of rank {member.rank}"] = len(member._cache)
    return found
