"""How a batch is cut into microbatches. Pure: rows are numbers, and whoever has tensors slices them."""

from __future__ import annotations

from coordd.errors import ArgumentError

__all__ = ["cut", "fitting"]


def cut(rows: int, count: int) -> list[slice]:
    """Cuts rows into so many microbatches of nearly equal size that differ by one row at most; none is empty.

    Raises:
        ArgumentError: there are fewer rows than microbatches.
    """
    if rows < count:
        raise ArgumentError(f"{rows} rows cannot be cut into {count} microbatches: use a larger batch")
    bounds = [-(-rows * number // count) for number in range(count + 1)]
    return [slice(bounds[number], bounds[number + 1]) for number in range(count)]


def fitting(rows: int, wanted: int, replicas: int, *, stride: int = 1) -> int:
    """Says into how many microbatches a batch is cut: as many as wanted, or fewer if it is too small for them.

    Args:
        rows: of the batch, of all replicas together.
        wanted: microbatches for each replica.
        replicas: how many take microbatches in turn; all get equally many.
        stride: of what the number is a multiple.

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
