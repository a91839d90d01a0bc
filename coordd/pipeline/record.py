"""Records what all ranks did in a run, on one clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError
from coordd.parallel.objects import allgather_object
from coordd.pipeline.measured import lag, observed
from coordd.pipeline.plan import Plan
from coordd.pipeline.recording import Recording, check_name
from coordd.pipeline.simulate import Costs, Span
from coordd.pipeline.units import Units

__all__ = ["Run", "latest", "record"]

_MEETINGS = 8


class Run(NamedTuple):
    """Data of a run on one rank.

    Attributes:
        plan: the plan that was executed, lowered.
        spans: of this rank, in seconds since the run began.
        since: when the run began, by this rank's clock.
        training: whether there were backward passes.
    """

    plan: Plan
    spans: Sequence[Span]
    since: float
    training: bool


def latest(before: Run | None, now: Run) -> Run:
    """Returns the run to show to the user: the later one, but a training run rather than the evaluation after it."""
    return before if before is not None and before.training and not now.training else now


def record(
    path: str | Path | None, run: Run | None, costs: Costs | None, operations: Operations, *, name: str
) -> Recording:
    """Gathers the spans of all ranks; rank 0 writes them.

    Args:
        path: of the file; None for none.
        run: the run; None if there was none.
        costs: the expected costs of the passes, in seconds and bytes; None to use the measured ones.
        operations: of the daemon.
        name: of the gather; the same on all ranks.

    Raises:
        ArgumentError: there was no run, or the file's extension is unknown.
        OSError: rank 0 cannot write the file.
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
    """Returns when this rank entered and left a barrier."""
    came = time.perf_counter()
    operations.barrier().result()
    return came, time.perf_counter()
