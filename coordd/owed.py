"""Refusals that ranks will get when they announce their part of what was refused before they came. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from coordd.ballot import members_mask
from coordd.group_names import covers
from coordd.messages import Response

__all__ = ["Owed"]


class _Refusal(NamedTuple):
    """What a rank will be told, and who had left when it was due."""

    response: Response
    left: int


class Owed:
    """By name and rank, what is owed, oldest first."""

    def __init__(self) -> None:
        self._refusals: dict[tuple[str, int], deque[_Refusal]] = {}

    def __bool__(self) -> bool:
        return bool(self._refusals)

    @property
    def names(self) -> set[str]:
        """The operations of which a refusal is owed."""
        return {name for name, _ in self._refusals}

    def enter(self, rank: int, refusal: Response, left: int) -> None:
        """Notes that a rank will get a refusal; ``left`` is the bit mask of those who have left."""
        self._refusals.setdefault((refusal.request.name, rank), deque()).append(_Refusal(refusal, left))

    def discharge(self, rank: int, name: str, members: int) -> bool:
        """Drops what a rank is owed that refuses its part of an operation or a group; says whether there was anything.

        The other members have been told of that part already.
        """
        names = [each for each in self.names if covers(name, each)]
        dropped = [each for each in names if self.claim(rank, each, members) is not None]
        return bool(dropped)

    def claim(self, rank: int, name: str, members: int) -> Response | None:
        """Takes what a rank is owed that announces its part, if its members, a bit mask, would have contradicted."""
        owed = self._refusals.get((name, rank))
        if owed is None or not members & members_mask(owed[0].response.recipients) or members & owed[0].left:
            return None
        response = owed.popleft().response
        if not owed:
            del self._refusals[name, rank]
        return msgspec.structs.replace(response, recipients=(rank,))
