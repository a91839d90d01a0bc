"""Who takes part with nothing: ranks that have joined, until all members of their process set have. Pure."""

from __future__ import annotations

__all__ = ["Absence"]


class Absence:
    """The ranks that have joined, as bits, by the process set in which they did.

    Who has joined the ranks of one set has joined those of all its subsets, so joining the world is joining everything.
    """

    def __init__(self) -> None:
        self._joined: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._joined)

    def begin(self, members: int, ranks: int) -> None:
        """Notes that ranks have joined a set; the last one of them is the one that counts as last."""
        self._joined[members] = self._joined.get(members, 0) | ranks
        self._last[members] = ranks.bit_length() - 1

    def end(self, members: int) -> int:
        """Ends a set's absence, when all its members have joined or that fails; returns the rank that was the last."""
        self._joined.pop(members, None)
        return self._last.pop(members, -1)

    def of(self, members: int) -> int:
        """Finds those of an operation's members that take part with nothing."""
        found = 0
        for wide, ranks in self._joined.items():
            if not members & ~wide:
                found |= ranks
        return found & members
