"""Surveys that tests make up."""

from __future__ import annotations

from coordd.monitoring.status.probe_result import Life, Sighting, Survey
from coordd.monitoring.status.report import Operation, Plan, Stack, Standing, Submission, Traffic

__all__ = ["HERE", "MAIN", "WAITING", "operation", "seen", "standing", "survey"]

HERE = "node1"
MAIN = Stack("MainThread", ("train.py:9 in <module>: main()", "train.py:31 in main: loss.backward()"))
WAITING = Stack("MainThread", MAIN.lines, "coordd_torch.optimizer.synchronize")


def operation(name, *, seconds=2.5, **fields):
    return Operation("allreduce", name, seconds, "train.py:31", **fields)


def standing(rank, *operations, size=2, waits=False, **fields):
    fields.setdefault("phase", "running")
    fields.setdefault("stacks", (WAITING if waits else MAIN,))
    fields.setdefault("last", Submission("w", "train.py:31", 2.5))
    fields.setdefault("plan", Plan(seen=12, hits=30, misses=10))
    fields.setdefault("traffic", Traffic({"allreduce": 40}, {"allreduce": 40 << 20}, 30, 1 << 20))
    return Standing("1.2", rank, size, HERE, 100 + rank, 20.0, operations=operations, **fields)


def seen(found, **fields):
    """A rank that has answered, or the number of one that has not."""
    if isinstance(found, Standing):
        return Sighting(found.rank, found.host, found.pid, Life.SLEEPING, standing=found)
    return Sighting(found, **fields)


def survey(*found):
    sightings = tuple(each if isinstance(each, Sighting) else seen(each) for each in found)
    return Survey("job7", "python train.py", HERE, len(sightings), sightings)
