"""The joined ranks: ranks that contribute placeholders until all members of their process set have joined. Pure."""

from __future__ import annotations

__all__ = ["Absence"]


class Absence:
    """The ranks that have joined, as bit masks, keyed by the process set (a bit mask, too) in which they joined.

    A rank that has joined a set has joined all its subsets, so a rank that has joined the world has joined every set.
    """

    def __init__(self) -> None:
        self._joined: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._joined)

    def begin(self, members: int, ranks: int) -> None:
        """Records that ``ranks`` have joined a set; the highest of them becomes the set's last rank to join."""
        self._joined[members] = self._joined.get(members, 0) | ranks
        self._last[members] = ranks.bit_length() - 1

    def end(self, members: int) -> int:
        """Removes a set once all members have joined or the join has failed; returns the last rank to join, or -1."""
        self._joined.pop(members, None)
        return self._last.pop(members, -1)

    def of(self, members: int) -> int:
        """Returns the members of an operation that are joined ranks, as a bit mask."""
        found = 0
        for wide, ranks in self._joined.items():
            if not members & ~wide:
                found |= ranks
        return found & members
