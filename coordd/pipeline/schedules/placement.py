"""Placement of stages on ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordd.errors import ArgumentError

__all__ = ["Placement", "fold", "loop", "spread"]

Placement = tuple[tuple[int, ...], ...]
"""For each stage the ranks that have it, its replicas."""


def spread(stages: int, replicas: int | Sequence[int] = 1) -> Placement:
    """Gives each stage ranks of its own.

    With equal numbers of replicas each pipeline is a run of ranks, so that neighbours are close; with a number for each
    stage, the replicas of a stage are a run of ranks.

    Raises:
        ArgumentError: the number of replica counts is not the number of stages.
    """
    if isinstance(replicas, int):
        return loop(stages, 1, replicas=replicas)
    if len(replicas) != stages:
        raise ArgumentError(f"{len(replicas)} numbers of replicas for {stages} stages: give one for each")
    bounds = [sum(replicas[:stage]) for stage in range(stages + 1)]
    return tuple(tuple(range(bounds[stage], bounds[stage + 1])) for stage in range(stages))


def loop(ranks: int, chunks: int, *, replicas: int = 1) -> Placement:
    """Assigns ``ranks * chunks`` stages to the ranks of each replica, round-robin."""
    return tuple(
        tuple(replica * ranks + stage % ranks for replica in range(replicas)) for stage in range(ranks * chunks)
    )


def fold(ranks: int, *, replicas: int = 1) -> Placement:
    """Gives each rank two stages in V shape, one down and one back up; the last rank has the two in the middle."""
    there = loop(ranks, 1, replicas=replicas)
    return there + there[::-1]
