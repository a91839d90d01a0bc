"""Sharing a data set out among ranks, so that all of them make the same number of steps."""

from __future__ import annotations

from typing import Any

from coordd import api
from coordd.errors import ArgumentError

__all__ = ["shard"]


def shard(dataset: Any, *, uneven: str = "drop") -> Any:
    """Gives each rank its part of a `tf.data.Dataset`: of examples, before they are shuffled and batched.

    A rank with one batch more than the others would wait for them in vain, so all parts have the same length.

    Args:
        dataset: the same on all ranks, in the same order; with a known number of elements.
        uneven: what to do with elements that cannot be divided evenly: ``"drop"`` them, or ``"repeat"`` the first ones
            until they can.

    Raises:
        ArgumentError: the number is not known, infinite, or too small for so many ranks.
    """
    rank, size = api.rank(), api.size()
    count = int(dataset.cardinality())
    if count < 0:
        text = (
            "the number of elements is not known, so no parts of equal length can be made: use dataset.apply("
            "tf.data.experimental.assert_cardinality(n)), or, if it is infinite, dataset.shard(size(), rank())"
        )
        raise ArgumentError(text)
    if uneven not in {"drop", "repeat"}:
        text = f'uneven is "drop" or "repeat", not {uneven!r}'
        raise ArgumentError(text)
    if count < size and uneven == "drop":
        text = f"{count} elements are too few for {size} ranks"
        raise ArgumentError(text)
    each = count // size if uneven == "drop" else -(-count // size)
    whole = dataset.take(each * size) if uneven == "drop" else dataset.repeat().take(each * size)
    return whole.shard(size, rank)
