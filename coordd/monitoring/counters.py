"""Counters of moved data: integers that the daemon's thread adds to, and other threads read."""

from __future__ import annotations

from collections.abc import Sequence

from coordd.negotiation.tensor_table import Entry
from coordd.ops.messages import Kind

__all__ = ["Traffic"]


class Traffic:
    """Completed operations, and the bytes that this rank contributed to them."""

    def __init__(self) -> None:
        self.operations = dict.fromkeys(Kind, 0)
        self.bytes = dict.fromkeys(Kind, 0)
        self.locked = 0
        """How many of the tensors moved under a locked plan."""

    def count(self, entries: Sequence[Entry]) -> None:
        """Counts entries that completed together."""
        kind = entries[0].request.kind
        self.operations[kind] += len(entries)
        self.bytes[kind] += sum([entry.array.nbytes for entry in entries])
