"""Numbers the negotiated buckets, and assigns the slots in which their members meet. Pure.

Every rank sees the buckets of all process sets in the order of the plans, so every rank computes the same numbers and
slots. Process sets that have a rank in common get separate slots, as far as there are any, so that no set waits for
another. If there are more such sets than groups of slots, some share a group. That is slower, never wrong: on every
rank the operations of a slot follow each other in the order of their numbers, so each waits for lower numbers only.
"""

from __future__ import annotations

from coordd.negotiation.ballot import members_mask

__all__ = ["SLOTS", "Numbering"]

_GROUPS = 16
_DEPTH = 16
SLOTS = _GROUPS * _DEPTH
"""The slots of negotiated buckets are below this number; those of locked buckets come after them."""


class Numbering:
    """Counts buckets: all of them, and those of each process set."""

    def __init__(self, *, groups: int = _GROUPS, depth: int = _DEPTH) -> None:
        """Starts before the first bucket.

        Args:
            groups: process sets with a common rank that can have separate slots; at least 2.
            depth: slots of each group; the number of a set's buckets that can be in flight.
        """
        self._depth = depth
        self._sequence = 0
        self._sets: dict[tuple[int, ...], list[int]] = {(): [0, 0]}  # group and number of buckets
        self._taken = [-1] + [0] * (groups - 1)  # by group, the ranks that have a set in it; the world has the first

    def next(self, members: tuple[int, ...]) -> tuple[int, int]:
        """Returns the number and the slot of the next bucket.

        Args:
            members: its process set; empty for the world.
        """
        found = self._sets.get(members)
        if found is None:
            found = self._sets[members] = [self._group(members_mask(members)), 0]
        self._sequence += 1
        found[1] += 1
        return self._sequence, found[0] * self._depth + found[1] % self._depth

    def _group(self, ranks: int) -> int:
        """Returns the group for a new set: the first in which none of its ranks has a set, or else the next in turn."""
        in_turn = 1 + len(self._sets) % (len(self._taken) - 1)
        found = next((group for group, taken in enumerate(self._taken) if not taken & ranks), in_turn)
        self._taken[found] |= ranks
        return found
