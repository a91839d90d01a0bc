"""The input of the data plane: buckets of entries that move together."""

from __future__ import annotations

import msgspec

from coordd.negotiation.tensor_table import Entry
from coordd.ops.messages import Request

__all__ = ["Bucket", "Locked"]


class Bucket(msgspec.Struct, frozen=True):
    """Entries that move together, in the same order on all ranks.

    ``sequence`` is the number of a negotiated bucket, equal on all ranks, and ``slot`` is the shared-memory slot of its
    members; both are 0 in a locked bucket. ``absent`` is the number of joined ranks, which contribute placeholders.
    """

    sequence: int
    request: Request
    sizes: tuple[int, ...]
    entries: tuple[Entry, ...]
    absent: int = 0
    slot: int = 0


class Locked(msgspec.Struct, frozen=True):
    """This rank's vote on one iteration of a locked bucket.

    With a ``bucket`` the vote is *valid*: the bucket moves if all ranks vote valid. Without one it is *invalid*, and
    nothing moves on any rank. Votes are matched by ``(lock, index, occurrence)``; locked buckets have no common order
    among themselves, nor with negotiated ones.
    """

    lock: int
    index: int
    occurrence: int
    bucket: Bucket | None = None
