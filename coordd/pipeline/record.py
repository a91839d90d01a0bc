"""Writing down what all ranks did in a run, in one time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coordd.errors import ArgumentError
from coordd.objects import allgather_object
from coordd.operations import Operations
from coordd.pipeline.measured import lag, observed
from coordd.pipeline.plan import Plan
from coordd.pipeline.recording import Recording, check_name
from coordd.pipeline.simulate import Costs, Span
from coordd.pipeline.units import Units

__all__ = ["Run", "latest", "record"]

_MEETINGS = 8


class Run(NamedTuple):
    """What a run leaves on a rank.

    Attributes:
        plan: what was done, lowered.
        spans: of this rank, in seconds since the run began.
        since: when that was, by this rank's clock.
        training: whether it was gone back.
    """

    plan: Plan
    spans: Sequence[Span]
    since: float
    training: bool


def latest(before: Run | None, now: Run) -> Run:
    """Says which of two runs people want to see: the later one, but training rather than the evaluation after it."""
    return before if before is not None and before.training and not now.training else now


def record(
    path: str | Path | None, run: Run | None, costs: Costs | None, operations: Operations, *, name: str
) -> Recording:
    """Gathers the spans of all ranks, and has rank 0 write them.

    Args:
        path: of the file; None for none.
        run: what was done; None if nothing was.
        costs: what passes were expected to take, in seconds and bytes; if nothing was, it is what they took.
        operations: of the daemon.
        name: of what is sent; the same on all ranks.

    Raises:
        ArgumentError: nothing was run, or the file's name has no ending that is known.
        OSError: rank 0 cannot write it.
    """
    if run is None:
        raise ArgumentError("nothing was run that could be recorded: train a batch first")
    plan, spans, since, _ = run
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
