"""Whether a tensor was changed between its submission and the moment when its data moves; for debugging.

An operation reads the tensor when all ranks have it, so what is written to it before goes into some sums and not into
others, and nobody notices. A seal is a checksum, and costs a pass over the tensor each time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from coordd.errors import ChangedError
from coordd.messages import Kind
from coordd.table import Entry, show_site

__all__ = ["check", "seal"]


def seal(entry: Entry, *, rank: int) -> None:
    """Notes what an entry holds, if this rank's data matters."""
    request = entry.request
    if request.kind is not Kind.BROADCAST or request.root == rank:
        entry.seal = _print(entry.array)


def check(entries: Iterable[Entry]) -> None:
    """Lets those entries fail whose tensors have changed; their data moves all the same, for others wait for it."""
    for entry in entries:
        if entry.seal is not None and entry.seal != _print(entry.array):
            error = ChangedError(entry.request.name, show_site(entry.site))

            def refuse(_: np.ndarray, error: ChangedError = error) -> None:
                raise error

            entry.land = refuse
        entry.seal = None


def _print(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
