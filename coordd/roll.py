"""Who has announced which known tensors: slots of the cache are bits of one integer, ranks are bits of another.

Pure. Slots that the same ranks have announced in the same way are kept together. So a step in which all say the same
costs the same whatever the number of its tensors and ranks, and one in which a few are late little more.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Roll"]


class Roll:
    """A roll call: by the ranks that have announced them, and those of these that only fill up, sets of slots."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], int] = {}

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Lists ranks, those of them that only fill up, and the slots of which exactly this is true."""
        return ((told, filled, slots) for (told, filled), slots in self._groups.items())

    @property
    def slots(self) -> int:
        """What anybody has announced."""
        found = 0
        for slots in self._groups.values():
            found |= slots
        return found

    @property
    def void(self) -> int:
        """What nobody has announced in earnest."""
        found = 0
        for (told, filled), slots in self._groups.items():
            if told == filled:
                found |= slots
        return found

    @property
    def earnest(self) -> int:
        """What nobody has announced to fill it up only."""
        found = 0
        for (_, filled), slots in self._groups.items():
            if not filled:
                found |= slots
        return found

    def ranks(self, slot: int) -> tuple[int, int]:
        """Says who has announced a slot, and who of them only fills it up."""
        return next((key for key, slots in self._groups.items() if slots >> slot & 1), (0, 0))

    def enter(self, ranks: int, hits: int, fillers: int = 0) -> None:
        """Notes that ranks have announced slots, some of which they only fill up."""
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
        """Finds those of some slots that all wanted ranks have announced."""
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
