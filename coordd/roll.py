"""Who has announced which known tensors: slots of the cache are bits of one integer, ranks are bits of another.

Pure. Slots that the same ranks have announced are kept together. So a step in which all say the same costs the same
whatever the number of its tensors and ranks, and one in which a few are late little more.
"""

from __future__ import annotations

from collections.abc import ItemsView

__all__ = ["Roll"]


class Roll:
    """A roll call; ``earnest`` are the slots for which some rank has something, ``idle`` those that some rank fills."""

    def __init__(self) -> None:
        self._groups: dict[int, int] = {}
        self.earnest = 0
        self.idle = 0

    def items(self) -> ItemsView[int, int]:
        """Lists ranks, and the slots that they and nobody else have announced."""
        return self._groups.items()

    @property
    def slots(self) -> int:
        """What anybody has announced."""
        found = 0
        for slots in self._groups.values():
            found |= slots
        return found

    def ranks(self, slot: int) -> int:
        """Says who has announced a slot."""
        return next((ranks for ranks, slots in self._groups.items() if slots >> slot & 1), 0)

    def enter(self, ranks: int, hits: int, fillers: int = 0) -> None:
        """Notes that ranks have announced slots, some of them as fillers."""
        self.idle |= hits & fillers
        self.earnest |= hits & ~fillers
        found: dict[int, int] = {}
        for told, slots in self._groups.items():
            if both := slots & hits:
                hits ^= both
                found[told | ranks] = found.get(told | ranks, 0) | both
            if rest := slots ^ both:
                found[told] = found.get(told, 0) | rest
        if hits:
            found[ranks] = found.get(ranks, 0) | hits
        self._groups = found

    def complete(self, slots: int, wanted: int) -> int:
        """Finds those of some slots that all wanted ranks have announced."""
        found = 0
        for told, there in self._groups.items():
            if not wanted & ~told:
                found |= slots & there
        return found

    def drop(self, slots: int) -> None:
        """Forgets slots."""
        self._groups = {told: rest for told, there in self._groups.items() if (rest := there & ~slots)}
        self.earnest &= ~slots
        self.idle &= ~slots

    def withdraw(self, ranks: int, slot: int) -> None:
        """Forgets that ranks have announced a slot."""
        if left := self.ranks(slot) & ~ranks:
            self._groups = {told: rest for told, there in self._groups.items() if (rest := there & ~(1 << slot))}
            self._groups[left] = self._groups.get(left, 0) | 1 << slot
        else:
            self.drop(1 << slot)
