"""A locked plan on one rank: gathers entries into buckets and counts the rank's votes. Pure.

Its one rule: a rank votes on iteration k of a bucket only after iteration k-1 succeeded. So all ranks give the same
number of votes on every bucket, and no rank waits for a vote that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordd.negotiation.bucket import Bucket, Locked
from coordd.negotiation.tensor_table import Entry

__all__ = ["Lock"]


class _Line:
    """One locked bucket: its slots, the entries of its next iteration, and its state."""

    __slots__ = ("ended", "entries", "flying", "given", "index", "slots")

    def __init__(self, index: int, slots: tuple[int, ...]) -> None:
        self.index = index
        self.slots = slots
        self.entries: dict[int, Entry] = {}
        self.given = 0
        self.flying = False
        self.ended = False


class Lock:
    """Gathers entries until buckets are complete; ``number`` is the sequence number of the plan that made the lock."""

    def __init__(self, number: int, buckets: Sequence[tuple[int, ...]]) -> None:
        """Starts with nothing gathered.

        Args:
            number: the sequence number of the plan.
            buckets: the slots of each bucket.
        """
        self.number = number
        self._broken = False
        self._lines = [_Line(index, slots) for index, slots in enumerate(buckets)]
        self._line_of = {slot: line for line in self._lines for slot in line.slots}

    def __contains__(self, slot: int) -> bool:
        return slot in self._line_of

    @property
    def slots(self) -> list[int]:
        """All locked slots."""
        return list(self._line_of)

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return len(self._lines)

    @property
    def held(self) -> list[Entry]:
        """The entries that wait here for the rest of their bucket."""
        return [entry for line in self._lines for entry in line.entries.values()]

    @property
    def partial(self) -> bool:
        """Whether entries are held back because other tensors of their bucket are missing."""
        return any(line.entries for line in self._lines)

    @property
    def held_since(self) -> float | None:
        """When the partly filled bucket that has waited longest got its latest tensor; None if there is none."""
        filled = [line.entries.values() for line in self._lines if line.entries]
        return min((max(entry.handle.submitted for entry in entries) for entries in filled), default=None)

    @property
    def flying(self) -> bool:
        """Whether this rank's valid vote on an iteration still has no outcome."""
        return any(line.flying for line in self._lines)

    def is_flying(self, index: int) -> bool:
        """Whether this rank's valid vote on the bucket with this index, if there is one, still has no outcome."""
        return index < len(self._lines) and self._lines[index].flying

    @property
    def lasted(self) -> int:
        """The largest number of iterations that any of its buckets has started."""
        return max(line.given for line in self._lines)

    def gather(self, slot: int, entry: Entry) -> Locked | None:
        """Puts an entry into its bucket; returns the valid vote once the bucket is complete."""
        line = self._line_of[slot]
        line.entries[slot] = entry
        if len(line.entries) < len(line.slots):
            return None
        entries = tuple([line.entries[slot] for slot in line.slots])
        line.entries = {}
        line.given += 1
        line.flying = True
        return Locked(self.number, line.index, line.given, Bucket(0, entries[0].request, (), entries))

    def dissolve(self) -> tuple[list[Locked], list[Entry]]:
        """Breaks the lock; returns the invalid votes to give now, and the entries that were gathered."""
        self._broken = True
        entries = self.held
        for line in self._lines:
            line.entries = {}
        return [self._end(line) for line in self._lines if not (line.flying or line.ended)], entries

    def land(self, locked: Locked) -> Locked | None:
        """Records that all votes were valid; returns the invalid vote on the next iteration if the lock is broken."""
        line = self._lines[locked.index]
        line.flying = False
        return self._end(line) if self._broken else None

    def refuse(self, locked: Locked) -> None:
        """Records that a vote was invalid; the bucket ends with this iteration on all ranks."""
        line = self._lines[locked.index]
        line.flying = False
        line.ended = True

    def _end(self, line: _Line) -> Locked:
        line.given += 1
        line.ended = True
        return Locked(self.number, line.index, line.given)
