"""Writing down what all ranks did in a run, in one time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from coordd.objects import allgather_object
from coordd.operations import Operations
from coordd.pipeline.measured import lag, observed
from coordd.pipeline.plan import Plan
from coordd.pipeline.recording import Recording, check_name
from coordd.pipeline.simulate import Costs, Span
from coordd.pipeline.units import Units

__all__ = ["record"]

_MEETINGS = 8


def record(  # noqa: PLR0913 - what a run leaves, and where it goes
    path: str | Path | None,
    plan: Plan,
    spans: Sequence[Span],
    costs: Costs | None,
    operations: Operations,
    *,
    since: float,
    name: str,
) -> Recording:
    """Gathers the spans of all ranks, and has rank 0 write them.

    Args:
        path: of the file; None for none.
        plan: what was done, lowered.
        spans: of this rank, in seconds since the run began.
        costs: what passes were expected to take, in seconds and bytes; if nothing was, it is what they took.
        operations: of the daemon.
        since: when that was, by this rank's clock.
        name: of what is sent; the same on all ranks.

    Raises:
        ArgumentError: the file's name has no ending that is known.
        OSError: rank 0 cannot write it.
    """
    where = None if path is None else Path(path)
    if where is not None:
        check_name(where)
    world = operations.daemon.world
    meetings = [_meeting(operations) for _ in range(_MEETINGS if len(set(world.hosts)) > 1 else 0)]
    mine = [Span(action, since + begin, since + end) for action, begin, end in spans]
    gathered = allgather_object((mine, meetings), name=name)
    found = []
    for rank, (each, met) in enumerate(gathered):
        # Processes of one host read the same clock.
        ahead = 0.0 if world.hosts[rank] == world.hosts[0] else lag(met, gathered[0][1])
        found.append(tuple(Span(action, begin - ahead, end - ahead) for action, begin, end in each))
    if costs is None:
        recording = Recording(plan, tuple(found), observed(plan, found), Units(memory="activations"))
    else:
        recording = Recording(plan, tuple(found), costs)
    if where is not None and world.rank == 0:
        recording.write(where)
    return recording


def _meeting(operations: Operations) -> tuple[float, float]:
    """When this rank came to a barrier, and left it."""
    came = time.perf_counter()
    operations.barrier().result()
    return came, time.perf_counter()
