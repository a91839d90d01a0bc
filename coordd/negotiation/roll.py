"""The message table of cached tensors: slots of the cache are bits of one integer, ranks are bits of another.

Pure. Slots that the same ranks have announced in the same way are kept together. So a step in which all ranks announce
the same tensors costs the same for any number of tensors and ranks, and one in which a few ranks are late costs
little more.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Roll"]


class Roll:
    """Sets of slots, by the ranks that have announced them and the ranks among these that only have fillers."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], int] = {}

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yields ranks, those of them that only have fillers, and the slots that exactly these have announced."""
        return ((told, filled, slots) for (told, filled), slots in self._groups.items())

    @property
    def slots(self) -> int:
        """The slots that any rank has announced."""
        found = 0
        for slots in self._groups.values():
            found |= slots
        return found

    @property
    def void(self) -> int:
        """The announced slots for which all ranks so far only have fillers."""
        found = 0
        for (told, filled), slots in self._groups.items():
            if told == filled:
                found |= slots
        return found

    @property
    def earnest(self) -> int:
        """The announced slots for which no rank so far has a filler."""
        found = 0
        for (_, filled), slots in self._groups.items():
            if not filled:
                found |= slots
        return found

    def ranks(self, slot: int) -> tuple[int, int]:
        """Returns the ranks that have announced a slot, and those of them that only have fillers."""
        return next((key for key, slots in self._groups.items() if slots >> slot & 1), (0, 0))

    def enter(self, ranks: int, hits: int, fillers: int = 0) -> None:
        """Records that ranks have announced slots, some of them as fillers."""
        if earnest := hits & ~fillers:
            self._enter(ranks, 0, earnest)
        if fillers := hits & fillers:
            self._enter(ranks, ranks, fillers)

    def _enter(self, ranks: int, filling: int, hits: int) -> None:
        found: dict[tuple[int, int], int] = {}
        for (told, filled), slots in self._groups.items():
            if both := slots & hits:
                hits ^= both
                key = told | ranks, filled | filling
                found[key] = found.get(key, 0) | both
            if rest := slots ^ both:
                key = told, filled
                found[key] = found.get(key, 0) | rest
        if hits:
            key = ranks, filling
            found[key] = found.get(key, 0) | hits
        self._groups = found

    def complete(self, slots: int, wanted: int) -> int:
        """Returns those of the slots that all wanted ranks have announced."""
        found = 0
        for (told, _), there in self._groups.items():
            if not wanted & ~told:
                found |= slots & there
        return found

    def drop(self, slots: int) -> None:
        """Forgets slots."""
        self._groups = {key: rest for key, there in self._groups.items() if (rest := there & ~slots)}

    def withdraw(self, ranks: int, slot: int) -> None:
        """Forgets that ranks have announced a slot."""
        told, filled = self.ranks(slot)
        self.drop(1 << slot)
        if told & ~ranks:
            key = told & ~ranks, filled & ~ranks
            self._groups[key] = self._groups.get(key, 0) | 1 << slot
