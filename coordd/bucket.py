"""What the data plane is given: entries that travel together."""

from __future__ import annotations

import msgspec

from coordd.messages import Request
from coordd.table import Entry

__all__ = ["Bucket", "Locked"]


class Bucket(msgspec.Struct, frozen=True):
    """Entries that travel together, in the same order on all ranks.

    ``sequence`` is the common number of a negotiated bucket, and ``slot`` is where its members meet; a locked one has
    neither, so 0. So many members are ``absent``: they have joined, and have nothing.
    """

    sequence: int
    request: Request
    sizes: tuple[int, ...]
    entries: tuple[Entry, ...]
    absent: int = 0
    slot: int = 0


class Locked(msgspec.Struct, frozen=True):
    """This rank's word on one occurrence of a locked bucket.

    With a ``bucket`` the word is *valid*: here is what moves if all ranks give the same word. Without one it is
    *invalid*, and nothing moves anywhere. The words on an occurrence meet under ``(lock, index, occurrence)``; locked
    buckets have no common order among themselves, nor with negotiated ones.
    """

    lock: int
    index: int
    occurrence: int
    bucket: Bucket | None = None
