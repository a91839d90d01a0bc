"""Validates the announcements of all members under one name, and finds the attribute that differs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordd.errors import MismatchError
from coordd.negotiation.ballot import lowest
from coordd.negotiation.wire import bits
from coordd.ops.messages import Announcement, Kind, Request, Response

__all__ = ["sites", "verdict"]


def _shape(request: Request) -> str:
    """Returns the dimensions that must be equal: all but the first for an allgather or alltoall."""
    if request.kind in {Kind.ALLGATHER, Kind.ALLTOALL}:
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
"""What all ranks must share, in the order of comparison."""

_PHRASES = {
    "operation": "Mismatched operations",
    "dtype": "Mismatched data types",
    "shape": "Mismatched {} tensor shapes",
    "reduction": "Mismatched reduction operation",
    "scale factors": "Mismatched prescale and/or postscale factors",
    "root rank": "Mismatched {} root ranks",
}
"""Horovod's wording for it, which people search their logs for; with the operation."""


def verdict(parts: Mapping[int, Announcement], absent: int = 0) -> Response:
    """Compares the announcements of all members under one name.

    Args:
        parts: the announcements by bit mask of the ranks that made them, each rank in one of them.
        absent: bit mask of the members that have joined instead.

    Returns:
        the response: either to carry it out, or the error that every member gets.
    """
    groups = sorted(parts, key=lowest) if len(parts) > 1 else list(parts)
    first = parts[groups[0]].request
    requests = [parts[group].request for group in groups]
    for attribute, show in _ATTRIBUTES.items() if len(parts) > 1 else ():
        values = [show(request) for request in requests]
        if any(value != values[0] for value in values):
            phrase = _PHRASES.get(attribute, "").format(first.kind.name)
            error = MismatchError(first.name, attribute, _by_value(parts, groups, values), phrase=phrase)
            ranks = tuple(bits(sum(groups)))
            return Response(first, error=str(error), attribute=attribute, recipients=ranks)
    if first.kind is Kind.BROADCAST and absent >> first.root & 1:
        text = f"broadcast of {first.name!r} from rank {first.root}, which has joined and has nothing to send"
        return Response(first, error=text, attribute="root rank", recipients=tuple(bits(sum(groups))))
    sizes = _sizes(parts, absent) if first.kind is Kind.ALLGATHER else ()
    return Response(first, sizes=sizes, absent=tuple(bits(absent)))


def _sizes(parts: Mapping[int, Announcement], absent: int) -> tuple[int, ...]:
    """Returns the first dimensions by rank; 0 for joined ranks."""
    by_rank = {rank: told.request.shape[0] for ranks, told in parts.items() for rank in bits(ranks)}
    by_rank |= dict.fromkeys(bits(absent), 0)
    return tuple(by_rank[rank] for rank in sorted(by_rank))


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
