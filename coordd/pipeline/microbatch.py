"""Cuts a batch into microbatches. Pure: rows are numbers; the callers slice the tensors."""

from __future__ import annotations

from coordd.errors import ArgumentError

__all__ = ["cut", "fitting"]


def cut(rows: int, count: int) -> list[slice]:
    """Cuts rows into ``count`` microbatches whose sizes differ by one row at most; none is empty.

    Raises:
        ArgumentError: there are fewer rows than microbatches.
    """
    if rows < count:
        raise ArgumentError(f"{rows} rows cannot be cut into {count} microbatches: use a larger batch")
    bounds = [-(-rows * number // count) for number in range(count + 1)]
    return [slice(bounds[number], bounds[number + 1]) for number in range(count)]


def fitting(rows: int, wanted: int, replicas: int, *, stride: int = 1) -> int:
    """Returns the number of microbatches for a batch: the wanted number, or fewer if the batch is too small.

    Args:
        rows: of the batch, over all replicas.
        wanted: microbatches for each replica.
        replicas: number of replicas that take microbatches in turn; all get equally many.
        stride: the result is a multiple of it.

    Returns:
        The number for each replica.

    Raises:
        ArgumentError: there are too few rows for that.
    """
    if rows < replicas * stride:
        raise ArgumentError(
            f"a batch of {rows} rows does not reach {replicas * stride} replicas: use a larger batch, or drop it"
        )
    return min(wanted, rows // replicas) // stride * stride
