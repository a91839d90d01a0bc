"""Shards a data set among ranks so that all ranks take the same number of steps."""

from __future__ import annotations

from typing import Any

from coordd import api
from coordd.errors import ArgumentError

__all__ = ["shard"]


def shard(dataset: Any, *, uneven: str = "drop") -> Any:
    """Returns this rank's shard of a `tf.data.Dataset` of examples; call it before shuffling and batching.

    All shards have the same length, because a rank with one batch more than the others would wait forever.

    Args:
        dataset: the same elements in the same order on all ranks; its cardinality must be known.
        uneven: what to do if the number of elements is not divisible by the number of ranks: ``"drop"`` the last
            elements, or ``"repeat"`` the first ones.

    Raises:
        ArgumentError: the cardinality is unknown, infinite or 0, or, with ``"drop"``, less than the number of ranks.
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
    if count < (size if uneven == "drop" else 1):
        text = f"{count} elements are too few for {size} ranks"
        raise ArgumentError(text)
    each = count // size if uneven == "drop" else -(-count // size)
    whole = dataset.take(each * size) if uneven == "drop" else dataset.repeat().take(each * size)
    return whole.shard(size, rank)
