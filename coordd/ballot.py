"""What ranks have announced under one name. Pure.

Ranks are bits of an integer, so those who say the same are counted at once, however many they are.
"""

from __future__ import annotations

from functools import lru_cache

from coordd.messages import Announcement

__all__ = ["Ballot", "lowest", "members_mask"]


class Ballot:
    """One name in one process set: who has announced it, and when the lowest member did among all that it announced.

    Ranks are bits: of ``wanted``, all members, those of ``told`` have announced it; ``parts`` says who announced what,
    and ``absent`` who had joined when it was complete without them.
    """

    __slots__ = ("absent", "members", "name", "parts", "told", "turn", "wanted")

    def __init__(self, name: str, members: tuple[int, ...], wanted: int) -> None:
        self.name = name
        self.members = members
        self.wanted = wanted
        self.told = 0
        self.absent = 0
        self.parts: dict[int, Announcement] = {}
        self.turn = 0

    def enter(self, ranks: int, announcement: Announcement, *, turn: int = 0) -> None:
        """Counts what some ranks have announced; ``turn`` is when."""
        self.told |= ranks
        self.parts[ranks] = announcement
        if ranks & self.wanted & -self.wanted:
            self.turn = turn

    @property
    def first(self) -> Announcement:
        """What the lowest rank has announced."""
        return self.parts[min(self.parts, key=lowest)]


def lowest(ranks: int) -> int:
    """Finds the lowest rank of a bit mask."""
    return (ranks & -ranks).bit_length() - 1


@lru_cache(maxsize=256)
def members_mask(ranks: tuple[int, ...]) -> int:
    """Makes a bit mask of ranks."""
    return sum(1 << rank for rank in ranks)
