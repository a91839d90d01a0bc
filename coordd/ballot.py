"""What all ranks together say about one tensor, and whether they agree.

Pure. Ranks are bits of an integer, so those who say the same are counted at once, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from coordd.errors import MismatchError
from coordd.messages import Announcement, Kind, Request, Response
from coordd.wire import bits

__all__ = ["Ballot", "lowest", "members_mask", "sites", "verdict"]


class Ballot:
    """One name in one process set: who has announced it, and when the lowest member did among all that it announced.

    Ranks are bits: of ``wanted``, all members, those of ``told`` have announced it; ``parts`` says who announced what.
    """

    __slots__ = ("members", "name", "parts", "told", "turn", "wanted")

    def __init__(self, name: str, members: tuple[int, ...], wanted: int) -> None:
        self.name = name
        self.members = members
        self.wanted = wanted
        self.told = 0
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


def _shape(request: Request) -> str:
    """The dimensions that must be equal: all but the first for an allgather."""
    if request.kind is Kind.ALLGATHER:
        return f"({', '.join(['any', *map(str, request.shape[1:])])})"
    return str(request.shape)


_ATTRIBUTES: dict[str, Callable[[Request], str]] = {
    "operation": lambda request: request.kind.name.lower(),
    "dtype": lambda request: request.dtype,
    "shape": _shape,
    "reduction": lambda request: request.op.name.lower(),
    "scale factors": lambda request: f"prescale {request.prescale!r}, postscale {request.postscale!r}",
    "root rank": lambda request: str(request.root),
}
"""What all ranks must share, in the order in which it is compared."""


def verdict(parts: Mapping[int, Announcement]) -> Response:
    """Compares what all members have announced under one name.

    Args:
        parts: the announcements by bit mask of the ranks that made them, each rank in one of them.

    Returns:
        the response: either to carry it out, or the error that every member gets.
    """
    groups = sorted(parts, key=lowest) if len(parts) > 1 else list(parts)
    first = parts[groups[0]].request
    requests = [parts[group].request for group in groups]
    for attribute, show in _ATTRIBUTES.items() if len(parts) > 1 else ():
        values = [show(request) for request in requests]
        if any(value != values[0] for value in values):
            error = MismatchError(first.name, attribute, _by_value(parts, groups, values))
            ranks = tuple(bits(sum(groups)))
            return Response(first, error=str(error), attribute=attribute, recipients=ranks)
    return Response(first, sizes=_sizes(parts) if first.kind is Kind.ALLGATHER else ())


def _sizes(parts: Mapping[int, Announcement]) -> tuple[int, ...]:
    """The first dimensions by rank."""
    by_rank = sorted((rank, told.request.shape[0]) for ranks, told in parts.items() for rank in bits(ranks))
    return tuple(size for _, size in by_rank)


def _by_value(
    parts: Mapping[int, Announcement], groups: list[int], values: list[str]
) -> list[tuple[str, list[int], list[str]]]:
    found: dict[str, dict[int, Announcement]] = {}
    for group, value in zip(groups, values, strict=True):
        found.setdefault(value, {})[group] = parts[group]
    return [(value, list(bits(sum(told))), sites(told)) for value, told in found.items()]


def sites(parts: Mapping[int, Announcement]) -> list[str]:
    """Lists the lines of code on which announcements were made, by rank."""
    return list(dict.fromkeys(parts[ranks].site for ranks in sorted(parts, key=lowest) if parts[ranks].site))
