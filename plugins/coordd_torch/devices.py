"""What the plugin must know of a chip: whether it can compute and communicate at the same time.

A chip with a single queue for both gains nothing from reductions during backward: each one only delays the computing.
There the gradients are reduced once, in one bucket, when backward ends. Packages for other chips announce theirs under
the entry-point group ``coordd.devices``: the name is PyTorch's device type, the object has an attribute ``overlaps``.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

__all__ = ["overlaps"]

_ONE_QUEUE = frozenset({"mps"})


@cache
def overlaps(kind: str) -> bool:
    """Says whether devices of this type, such as ``cpu``, compute while data moves."""
    for entry in entry_points(group="coordd.devices", name=kind):
        return bool(entry.load().overlaps)
    return kind not in _ONE_QUEUE
