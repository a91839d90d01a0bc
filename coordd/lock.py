"""A locked plan as one rank sees it: what is gathered in which bucket, and which words have been given.

Pure. Its one rule: the word on an occurrence is given once the one before has ended well. So on every bucket all ranks
give the same number of words, and nobody waits for one that does not come.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordd.bucket import Bucket, Locked
from coordd.table import Entry

__all__ = ["Lock"]


class _Line:
    """One bucket: its slots, the entries that are there for its next occurrence, and how far it has come."""

    __slots__ = ("ended", "entries", "flying", "given", "index", "slots")

    def __init__(self, index: int, slots: tuple[int, ...]) -> None:
        self.index = index
        self.slots = slots
        self.entries: dict[int, Entry] = {}
        self.given = 0
        self.flying = False
        self.ended = False


class Lock:
    """Gathers entries until buckets are complete; ``number`` is the sequence of the plan that made the lock."""

    def __init__(self, number: int, buckets: Sequence[tuple[int, ...]]) -> None:
        """Starts with nothing gathered.

        Args:
            number: the sequence of the plan.
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
        """Everything that is locked."""
        return list(self._line_of)

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return len(self._lines)

    @property
    def held(self) -> list[Entry]:
        """What waits here for the rest of its bucket."""
        return [entry for line in self._lines for entry in line.entries.values()]

    @property
    def partial(self) -> bool:
        """Whether entries are held back because others of their bucket are missing."""
        return any(line.entries for line in self._lines)

    @property
    def held_since(self) -> float | None:
        """When the partly filled bucket that has waited longest got its latest tensor; None if there is none."""
        filled = [line.entries.values() for line in self._lines if line.entries]
        return min((max(entry.handle.submitted for entry in entries) for entries in filled), default=None)

    @property
    def flying(self) -> bool:
        """Whether the outcome of an occurrence is still open that this rank wants to take part in."""
        return any(line.flying for line in self._lines)

    @property
    def lasted(self) -> int:
        """How often its buckets have started, at most."""
        return max(line.given for line in self._lines)

    def gather(self, slot: int, entry: Entry) -> Locked | None:
        """Puts an entry into its bucket; returns the valid word once that is complete."""
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
        """Breaks the lock; returns the invalid words that are due now, and the entries that were gathered."""
        self._broken = True
        entries = self.held
        for line in self._lines:
            line.entries = {}
        return [self._end(line) for line in self._lines if not (line.flying or line.ended)], entries

    def land(self, locked: Locked) -> Locked | None:
        """Notes that all words were valid; returns the invalid word on what would be next, if the lock is broken."""
        line = self._lines[locked.index]
        line.flying = False
        return self._end(line) if self._broken else None

    def refuse(self, locked: Locked) -> None:
        """Notes that a word was invalid; the bucket ends with this occurrence, on all ranks."""
        line = self._lines[locked.index]
        line.flying = False
        line.ended = True

    def _end(self, line: _Line) -> Locked:
        line.given += 1
        line.ended = True
        return Locked(self.number, line.index, line.given)
