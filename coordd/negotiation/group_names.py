"""Names of a group's operations, and of the group in a rejection; its size may differ between ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["covers", "first_alone", "group_of", "is_group", "is_unnamed", "names_in_group", "refused_names"]

_MARK = ".noname."
_WHOLE = "_*"
_IN_GROUP = re.compile(r"(.*)_(\d+)of(\d+)", re.DOTALL)


def names_in_group(base: str, names: Sequence[str | None]) -> list[str | None]:
    """Names the unnamed operations of a group.

    Args:
        base: the name of the group; a single unnamed operation gets it unchanged.
        names: the user's names; None for each operation without one.
    """
    if len(names) == 1:
        return [names[0] or base]
    return [name or f"{base}_{place}of{len(names)}" for place, name in enumerate(names)]


def refused_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns how a rejection refers to operations: by their names, or by that of their whole group.

    An operation without a user's name counts as a group, because other ranks may have a group where this one has a
    single operation.
    """
    group, size = group_of(names[0])
    if group and size == len(names) and all(group_of(name) == (group, size) for name in names):
        return (group,)
    return tuple(names)


def group_of(name: str) -> tuple[str, int]:
    """Returns how a rejection refers to an operation's group, and the group's size; "" if there is none."""
    if (found := _IN_GROUP.fullmatch(name)) is not None:
        base, _, size = found.groups()
        return base + _WHOLE, int(size)
    return (name + _WHOLE if is_unnamed(name) else ""), 1


def first_alone(name: str | None) -> str | None:
    """Renames the first operation of a group as if it were the only one, for groups that run one after the other."""
    return name and _IN_GROUP.sub(r"\1_0of1", name)


def is_group(said: str) -> bool:
    """Returns whether a rejection's name is that of a group."""
    return said.endswith(_WHOLE)


def is_unnamed(name: str) -> bool:
    """Returns whether an operation or a group has no user's name, as far as its name shows."""
    return _MARK in name


def covers(said: str, name: str) -> bool:
    """Returns whether a rejection with the name ``said`` covers the operation ``name``."""
    return said in {name, group_of(name)[0]}
