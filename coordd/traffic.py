"""What has been moved: whole numbers that the daemon's thread adds up, and others read."""

from __future__ import annotations

from collections.abc import Sequence

from coordd.messages import Kind
from coordd.table import Entry

__all__ = ["Traffic"]


class Traffic:
    """Operations that are done, and the bytes that this rank brought to them."""

    def __init__(self) -> None:
        self.operations = dict.fromkeys(Kind, 0)
        self.bytes = dict.fromkeys(Kind, 0)
        self.locked = 0
        """How many of them were not negotiated."""

    def count(self, entries: Sequence[Entry]) -> None:
        """Adds what has landed together."""
        kind = entries[0].request.kind
        self.operations[kind] += len(entries)
        self.bytes[kind] += sum([entry.array.nbytes for entry in entries])
