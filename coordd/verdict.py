"""The judgement on what all members have announced under one name: the same, or in what it differs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordd.errors import MismatchError
from coordd.messages import Announcement, Kind, Request, Response

__all__ = ["sites", "verdict"]


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


def verdict(by_rank: Mapping[int, Announcement]) -> Response:
    """Compares what all members have announced under one name.

    Args:
        by_rank: the announcements, one a member.

    Returns:
        the response: either to carry it out, or the error that every member gets.
    """
    ranks = sorted(by_rank)
    first = by_rank[ranks[0]].request
    requests = [by_rank[rank].request for rank in ranks]
    for attribute, show in _ATTRIBUTES.items():
        values = [show(request) for request in requests]
        if any(value != values[0] for value in values):
            error = MismatchError(first.name, attribute, _by_value(by_rank, ranks, values))
            return Response(first, error=str(error), attribute=attribute, recipients=tuple(ranks))
    sizes = tuple(request.shape[0] for request in requests) if first.kind is Kind.ALLGATHER else ()
    return Response(first, sizes=sizes)


def _by_value(
    by_rank: Mapping[int, Announcement], ranks: list[int], values: list[str]
) -> list[tuple[str, list[int], list[str]]]:
    groups: dict[str, dict[int, Announcement]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, {})[rank] = by_rank[rank]
    return [(value, sorted(group), sites(group)) for value, group in groups.items()]


def sites(by_rank: Mapping[int, Announcement]) -> list[str]:
    """Lists the lines that have announced something, by rank, each once."""
    return list(dict.fromkeys(told.site for _, told in sorted(by_rank.items()) if told.site))
