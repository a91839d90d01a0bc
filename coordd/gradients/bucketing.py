"""Partition of gradients into buckets: by size, or by the user's groups, each reduced as a whole. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from coordd.errors import ArgumentError
from coordd.ops.checks import whole

__all__ = ["Grouping", "Item", "partition"]


class Item(Protocol):
    """An item to assign to a bucket, such as a gradient."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        ...

    @property
    def kind(self) -> Hashable:
        """The property that all items of a bucket share, such as dtype and device."""
        ...

    @property
    def owner(self) -> object:
        """The user's parameter, by which groups refer to it."""
        ...


AnItem = TypeVar("AnItem", bound=Item)


def partition(items: Sequence[AnItem], *, limit: int, last: int) -> list[list[AnItem]]:
    """Partitions gradients, in the order in which they become ready, into buckets of one kind.

    Args:
        items: in an order that is equal on all ranks.
        limit: bytes of a bucket, unless a single item has more.
        last: bytes of the last bucket of each kind, which overlaps with no further computation.
    """
    kinds: dict[Hashable, list[AnItem]] = {}
    for item in items:
        kinds.setdefault(item.kind, []).append(item)
    found = []
    for alike in kinds.values():
        groups: list[list[AnItem]] = []
        room = -1
        if sum(item.nbytes for item in alike) <= min(limit, 2 * last):
            found.append(alike)
            continue
        for item in reversed(alike):
            if item.nbytes > room:
                groups.append([])
                room = limit if len(groups) > 1 else last
            groups[-1].append(item)
            room -= item.nbytes
        found += [group[::-1] for group in reversed(groups)]
    return found


class Grouping:
    """Horovod's ``num_groups`` and ``groups``: a number of groups of nearly equal size, or the user's groups."""

    def __init__(self, num_groups: int = 0, groups: Any = None, *, kind: type | tuple[type, ...]) -> None:
        """Parses the user's arguments.

        Args:
            num_groups: number of groups; 0 to divide by size.
            groups: the same, or lists of parameters.
            kind: the type of parameters.

        Raises:
            ArgumentError: it is neither a number, nor lists of parameters with each parameter in one list only.
        """
        if whole(num_groups, "num_groups") < 0:
            text = f"num_groups should be a non-negative integer, not {num_groups!r}"
            raise ArgumentError(text)
        if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
            num_groups, groups = groups, None
        self._count = num_groups
        lists = _lists(groups, kind)
        self._group_of = {id(parameter): at for at, group in enumerate(lists) for parameter in group}

    def choice(self, parameters: Iterable[object]) -> tuple[int, tuple[int, ...]]:
        """Returns the number of groups, and the index of each parameter's list or -1; free of object identities."""
        return self._count, tuple(self._group_of.get(id(parameter), -1) for parameter in parameters)

    def buckets(self, items: Sequence[AnItem], *, limit: int, last: int) -> list[list[AnItem]]:
        """Partitions items by the user's groups, and the rest like `partition`, with the same arguments."""
        if self._count:
            return [group for share in self._shares(items) for group in _whole(share)]
        by_group: dict[int, list[AnItem]] = {}
        for item in items:
            by_group.setdefault(self._group_of.get(id(item.owner), -1), []).append(item)
        found = partition(by_group.pop(-1, []), limit=limit, last=last)
        for group in by_group.values():
            found += _whole(group)
        return found

    def _shares(self, items: Sequence[AnItem]) -> list[list[AnItem]]:
        """Divides items into shares of nearly equal bytes, in order; an item's middle decides its share."""
        total = max(1, sum(item.nbytes for item in items))
        shares: list[list[AnItem]] = [[] for _ in range(self._count)]
        start = 0
        for item in items:
            shares[min(self._count - 1, (2 * start + item.nbytes) * self._count // (2 * total))].append(item)
            start += item.nbytes
        return [share for share in shares if share]


def _whole(group: Sequence[AnItem]) -> list[list[AnItem]]:
    """Partitions a group into one bucket per kind."""
    size = sum(item.nbytes for item in group)
    return partition(group, limit=size, last=size)


def _lists(groups: Any, kind: type | tuple[type, ...]) -> list[list[Any]]:
    if groups is None:
        return []
    text = "groups should be a non-negative integer or a list of lists of parameters"
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ArgumentError(text)
    members = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, kind) for parameter in members):
        raise ArgumentError(text)
    if len({id(parameter) for parameter in members}) < len(members):
        raise ArgumentError(f"{text}, and each parameter is in one of them only")
    return [list(group) for group in groups]
