"""Device properties: whether a device can compute and communicate at the same time.

A device with a single queue for both gains nothing from reductions during backward: each one only delays computation.
There the gradients are reduced once, in one bucket, when backward ends. Packages for other devices register under the
entry-point group ``coordd.devices``: the name is PyTorch's device type, the object has an attribute ``overlaps``.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

__all__ = ["overlaps"]

_ONE_QUEUE = frozenset({"mps"})


@cache
def overlaps(kind: str) -> bool:
    """Returns whether devices of this type, such as ``cpu``, compute while data is transferred."""
    for entry in entry_points(group="coordd.devices", name=kind):
        return bool(entry.load().overlaps)
    return kind not in _ONE_QUEUE
