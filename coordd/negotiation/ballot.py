"""Announcements of one tensor name by the ranks. Pure.

Ranks are bits of an integer, so ranks with equal announcements are counted in one operation, however many they are.
"""

from __future__ import annotations

from functools import lru_cache

from coordd.ops.messages import Announcement

__all__ = ["Ballot", "lowest", "members_mask"]


class Ballot:
    """An entry of the message table: which ranks have announced one name in one process set, and what they announced.

    Ranks are bits: of ``wanted``, all members, the ranks in ``told`` have announced it; ``parts`` maps ranks to their
    announcement; ``absent`` are the ranks that had joined when it was complete without them. ``turn`` is the position
    of the announcement among all announcements of the lowest member.
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
        """Records the announcement of some ranks, at position ``turn``."""
        self.told |= ranks
        self.parts[ranks] = announcement
        if ranks & self.wanted & -self.wanted:
            self.turn = turn

    @property
    def first(self) -> Announcement:
        """The announcement of the lowest rank."""
        return self.parts[min(self.parts, key=lowest)]


def lowest(ranks: int) -> int:
    """Returns the lowest rank of a bit mask."""
    return (ranks & -ranks).bit_length() - 1


@lru_cache(maxsize=256)
def members_mask(ranks: tuple[int, ...]) -> int:
    """Returns the bit mask of ranks."""
    return sum(1 << rank for rank in ranks)
