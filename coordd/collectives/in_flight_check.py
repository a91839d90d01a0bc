"""The in-flight check: whether a tensor changed between its submission and its transfer; for debugging.

An operation reads the tensor when all ranks have it, so a write before that goes into some sums and not into others,
without an error. The check takes a checksum, and costs a pass over the tensor each time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from coordd.errors import ChangedError
from coordd.negotiation.tensor_table import Entry, show_site
from coordd.ops.messages import Kind

__all__ = ["check", "seal"]


def seal(entry: Entry, *, rank: int) -> None:
    """Stores the checksum of an entry, if this rank's data matters."""
    request = entry.request
    if request.kind is not Kind.BROADCAST or request.root == rank:
        entry.seal = _print(entry.array)


def check(entries: Iterable[Entry]) -> None:
    """Fails the entries whose tensors have changed; their data moves all the same, because other ranks wait for it."""
    for entry in entries:
        if entry.seal is not None and entry.seal != _print(entry.array):
            error = ChangedError(entry.request.name, show_site(entry.site))

            def refuse(_: np.ndarray, error: ChangedError = error) -> None:
                raise error

            entry.land = refuse
        entry.seal = None


def _print(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
