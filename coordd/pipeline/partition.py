"""Splits a model into stages: runs of items (layers, or groups that stay together), none empty. Pure.

The slowest stage determines the speed of a pipeline, so the split minimises its cost, exactly. A stage costs

    the work of its items + the cut before it + the cut behind it

where a cut's seconds are the time that *no* overlap hides: packing and unpacking the values that cross it, in both
directions, on both sides. Bytes in flight while a rank computes cost nothing here. Among equally good splits it takes
the most even one (the least sum of squares), among equally even ones the one whose last stages are shorter: ten equal
layers in four stages are 3, 3, 2, 2. Only if one layer outweighs thousands is evenness, and only evenness, not
optimised over all splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Literal, get_args

import numpy as np

from coordd.errors import ArgumentError
from coordd.pipeline.load import Load, Memory
from coordd.pipeline.price import Cost, Held
from coordd.pipeline.sweep import evenest, lowest
from coordd.pipeline.units import Units

__all__ = ["By", "regroup", "split", "split_counts"]

By = Literal["time", "parameters", "layers", "memory"]

_FINE = 2.0**50  # units of the sum of all costs: equal times are equal integers, whatever the order of addition
_MOST_LISTED = 12


def split_counts(names: Sequence[str], counts: Sequence[int]) -> tuple[range, ...]:
    """Splits by the number of layers of each stage.

    Args:
        names: of the layers.
        counts: number of layers of each stage.

    Returns:
        For each stage its layers.

    Raises:
        ArgumentError: a count is below one, or the counts do not add up to the number of layers.
    """
    told = f"layers_per_proc={list(counts)}"
    if not counts:
        raise ArgumentError(f"{told} makes no stage: give the number of layers of each, as in [{len(names)}]")
    for stage, count in enumerate(counts):
        if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
            raise ArgumentError(f"{told} gives stage {stage} {count!r} layers: each stage needs one or more")
    missing = len(names) - sum(counts)
    if missing:
        change = f"add {missing}" if missing > 0 else f"take away {-missing}"
        if len(counts) > len(names):
            change = f"use at most {len(names)} stages"
        raise ArgumentError(
            f"{told} places {sum(counts)} layers, but the model has {len(names)} ({_listed(names)}): {change}, "
            'or set layers_per_proc="auto"'
        )
    return tuple(range(first, end) for first, end in pairwise(accumulate(counts, initial=0)))


def split(
    loads: Sequence[Load],
    stages: int,
    *,
    by: By = "time",
    cuts: Sequence[float] = (),
    memory: Memory | None = None,
) -> tuple[range, ...]:
    """Splits so that the cost of the costliest stage is minimal.

    Args:
        loads: of the items, in order.
        stages: number of stages.
        by: the cost of a stage: the seconds of its items and cuts, or the bytes of its weights, or its layers, or all
            the bytes that it holds.
        cuts: for each cut between two items, the seconds per microbatch that a stage on either side of it cannot hide;
            0 if left out.
        memory: what stages hold, and the most they may hold; by default 1F1B with one microbatch.

    Returns:
        For each stage its items. The split is exact if costs are integers, otherwise to a 10¹⁵th of their sum.

    Raises:
        ArgumentError: there are fewer items than stages, or no split stays below the memory's cap.
    """
    _check(loads, stages, by, cuts)
    memory = memory or Memory()
    held = _held(loads, stages, memory)
    if by == "memory":
        return _leanest(held, len(loads), stages, memory)
    edges = cuts if len(cuts) and by == "time" else [0.0] * (len(loads) - 1)
    cost = _cost([_value(load, by) for load in loads], edges)
    if not cost.work[-1]:
        raise ArgumentError(f"no layer has a cost to split by={by!r}: measure the layers, or split by='layers'")
    if memory.cap is not None:
        _leanest(held, len(loads), stages, memory)
        cost.limit(held, memory.cap)
    highest, ways = lowest(cost, len(loads), stages)
    return evenest(cost, highest, ways)


def regroup(groups: Sequence[range], stages: Sequence[range]) -> tuple[range, ...]:
    """Converts stages of groups of layers into stages of layers."""
    return tuple(range(groups[items.start].start, groups[items.stop - 1].stop) for items in stages)


def _value(load: Load, by: By) -> float:
    return {"time": load.seconds, "parameters": load.parameters, "layers": load.layers}[by]


def _cost(values: Sequence[float], edges: Sequence[float]) -> Cost:
    work, ends = np.array(values, float), np.array([0.0, *edges, 0.0])
    total = float(work.sum() + 2 * ends.sum())
    whole = total < _FINE and all(value.is_integer() for value in (*work.tolist(), *ends.tolist()))
    if not whole:
        work, ends = np.rint(work / total * _FINE), np.rint(ends / total * _FINE)
    return Cost(np.concatenate([[0.0], work.cumsum()]), ends)


def _held(loads: Sequence[Load], stages: int, memory: Memory) -> Held:
    return Held(
        np.array([0, *accumulate(load.parameters for load in loads)], float),
        np.array([0, *accumulate(load.activation for load in loads)], float),
        np.array([memory.weight(stage, stages) for stage in range(stages)], float),
        np.array([memory.live(stage, stages) for stage in range(stages)], float),
        np.array([memory.alive(stage, stages) for stage in range(stages)], float),
        np.array(memory.received(len(loads)), float),
    )


def _leanest(held: Held, items: int, stages: int, memory: Memory) -> tuple[range, ...]:
    """Returns the split whose fullest stage holds least."""
    least, ways = lowest(held, items, stages)
    found = evenest(held, max(least, 1.0), ways)
    if memory.cap is None or least <= memory.cap:
        return found
    full = [
        float(held(stage, slice(run.start, run.start + 1), slice(run.stop, run.stop + 1))[0])
        for stage, run in enumerate(found)
    ]
    stage = full.index(max(full))
    size = Units().size
    raise ArgumentError(
        f"no split in {stages} stages takes at most {memory.cap:,.0f} bytes on each: under {memory.schedule!r} "
        f"with {memory.microbatches} microbatches the least that works is {least:,.0f}; even then stage {stage} takes "
        f"{size(least)} and lacks {size(least - memory.cap)}: allow that much, change the number of stages, make "
        "microbatches smaller, or recompute activations"
    )


def _check(loads: Sequence[Load], stages: int, by: str, cuts: Sequence[float]) -> None:
    if by not in get_args(By):
        raise ArgumentError(f"a split by={by!r} is unknown; choose one of {', '.join(get_args(By))}")
    if stages < 1:
        raise ArgumentError(f"a model cannot be split in {stages} stages: give one or more")
    if stages > len(loads):
        raise ArgumentError(
            f"{stages} stages need {stages} layers or groups of layers, and the model has {len(loads)} that a cut may "
            f"separate: use at most {len(loads)} stages"
        )
    if len(cuts) not in (0, len(loads) - 1):
        raise ArgumentError(f"{len(loads)} items have {len(loads) - 1} cuts between them, and {len(cuts)} have a cost")
    wrong = next((seconds for seconds in cuts if not 0 <= seconds < float("inf")), None)
    if wrong is not None:
        raise ArgumentError(f"a cut cannot cost {wrong} seconds: measure it again")


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:_MOST_LISTED]]
    rest = [f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    return ", ".join(shown + rest)
