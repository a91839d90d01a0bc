"""Names of the operations of a group, and how a refusal names the group, whose size may differ between ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["covers", "first_alone", "group_of", "is_group", "is_unnamed", "names_in_group", "refused_names"]

_MARK = ".noname."
_WHOLE = "_*"
_IN_GROUP = re.compile(r"(.*)_(\d+)of(\d+)", re.DOTALL)


def names_in_group(base: str, names: Sequence[str | None]) -> list[str | None]:
    """Names the operations of a group that have no names.

    Args:
        base: the name of the group, which a single operation has itself.
        names: those that the user has given; None for each without one.
    """
    if len(names) == 1:
        return [names[0] or base]
    return [name or f"{base}_{place}of{len(names)}" for place, name in enumerate(names)]


def refused_names(names: Sequence[str]) -> tuple[str, ...]:
    """Finds what a refusal says of operations: their names, or that of their whole group.

    What has no name of the user's counts as a group, for other ranks may have a group where this one has a single
    operation.
    """
    group, size = group_of(names[0])
    if group and size == len(names) and all(group_of(name) == (group, size) for name in names):
        return (group,)
    return tuple(names)


def group_of(name: str) -> tuple[str, int]:
    """Finds what a refusal says of the group of an operation, and how many operations that has; "" if there is none."""
    if (found := _IN_GROUP.fullmatch(name)) is not None:
        base, _, size = found.groups()
        return base + _WHOLE, int(size)
    return (name + _WHOLE if is_unnamed(name) else ""), 1


def first_alone(name: str | None) -> str | None:
    """Renames the first operation of a group as if it were the only one: for what is done one after the other."""
    return name and _IN_GROUP.sub(r"\1_0of1", name)


def is_group(said: str) -> bool:
    """Whether what a refusal says is the name of a group."""
    return said.endswith(_WHOLE)


def is_unnamed(name: str) -> bool:
    """Whether an operation or a group has no name of the user's, as far as one can see."""
    return _MARK in name


def covers(said: str, name: str) -> bool:
    """Whether a refusal that says this is one of the operation with this name."""
    return said in {name, group_of(name)[0]}
