"""Names of operations to which the user gives none: equal on all ranks, because all count the same operations. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["group_of", "is_unnamed", "names_in_group"]

_MARK = ".noname."
_IN_GROUP = re.compile(r"([a-z]+\.noname\.[^_]*)_(\d+)of(\d+)")


def is_unnamed(name: str) -> bool:
    """Whether this is, or looks like, the name of an operation or a group without a name of the user's."""
    return _MARK in name


def names_in_group(base: str, names: Sequence[str | None]) -> list[str | None]:
    """Names the operations of a group that have no names.

    Args:
        base: the name of the group, which a single operation has itself.
        names: those that the user has given; None for each without one.
    """
    if len(names) == 1:
        return [names[0] or base]
    return [name or f"{base}_{place}of{len(names)}" for place, name in enumerate(names)]


def group_of(name: str) -> tuple[str, int]:
    """Finds the base of an operation's name, and how many operations there are in its group on the ranks that have it.

    Ranks whose groups differ in size give the operations different names, but equal bases.
    """
    if (found := _IN_GROUP.fullmatch(name)) is None:
        return name, 1
    base, _, size = found.groups()
    return base, int(size)
