"""The hierarchy of a reduction: how the members of an operation are spread over hosts, and which way data takes.

Pure: a function of the host of every rank, so that every member computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Route", "route"]


@dataclass(frozen=True)
class Route:
    """One member's part in a hierarchical reduction.

    Attributes:
        neighbours: the members on this host, ascending.
        owners: how many members of each host reduce slices; the same number on every host.
        peers: the owners of the same slice, one per host, including this rank; empty if it owns none or there is only
            one host.
    """

    neighbours: tuple[int, ...]
    owners: int
    peers: tuple[int, ...]


def route(rank: int, members: Sequence[int], hosts: Sequence[str]) -> Route:
    """Computes the part of a member.

    Args:
        rank: the member.
        members: global ranks, ascending.
        hosts: the host of every rank of the world.
    """
    groups: dict[str, list[int]] = {}
    for member in members:
        groups.setdefault(hosts[member], []).append(member)
    mine = groups[hosts[rank]]
    owners = min(map(len, groups.values()))
    place = mine.index(rank)
    peers = tuple(group[place] for group in groups.values()) if place < owners and len(groups) > 1 else ()
    return Route(tuple(mine), owners, peers)
