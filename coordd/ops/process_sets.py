"""The ranks that take part in an operation: a value, identified by its members."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from coordd.errors import ArgumentError
from coordd.ops.checks import whole

__all__ = ["ProcessSet", "check_process_set", "global_process_set", "named_ranks"]


@dataclass(frozen=True, init=False)
class ProcessSet:
    """Some ranks, ascending; without an argument, all ranks.

    Two sets with the same members are the same set, so there is nothing to register.
    """

    ranks: tuple[int, ...]

    def __init__(self, ranks: Iterable[int] | None = None) -> None:
        """Creates a set.

        Raises:
            ArgumentError: there are no ranks, or one of them is negative, given twice, or not a whole number.
        """
        members = () if ranks is None else _listed(ranks)
        if len(set(members)) < len(members) or any(rank < 0 for rank in members):
            text = f"a process set has each rank once, and none below 0: {members}"
            raise ArgumentError(text)
        object.__setattr__(self, "ranks", members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)

    def count(self, size: int) -> int:
        """Returns the number of members in a world of ``size`` ranks."""
        return len(self.ranks) or size

    def members(self, *, rank: int, size: int) -> tuple[int, ...]:
        """Returns the members as requests carry them: empty for the whole world of ``size`` ranks.

        Raises:
            ArgumentError: there are no such ranks, or ``rank`` is not one of them.
        """
        if not self.ranks or self.ranks == tuple(range(size)):
            return ()
        check_process_set(self, size)
        if rank not in self.ranks:
            text = f"Rank {rank} is not a member of the provided process set {self.ranks}"
            raise ArgumentError(text)
        return self.ranks


def _listed(ranks: Iterable[int]) -> tuple[int, ...]:
    """Returns the ranks of a set, sorted and checked."""
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
        text = f"a process set is made of ranks, as in ProcessSet([0, 1]), not of {ranks!r}"
        raise ArgumentError(text)
    members = tuple(sorted(whole(rank, "a rank of a process set") for rank in ranks))
    if not members:
        text = "a process set has at least one rank; all of them are ProcessSet(), or global_process_set"
        raise ArgumentError(text)
    return members


def check_process_set(given: object, size: int) -> None:
    """Rejects a value that is not a process set of a world of ``size`` ranks.

    Raises:
        ArgumentError: it is something else, or has ranks that do not exist.
    """
    if not isinstance(given, ProcessSet):
        text = f"process_set is a {type(given).__name__}, and must be a ProcessSet, as ProcessSet([0, 1])"
        raise ArgumentError(text)
    if given.ranks and given.ranks[-1] >= size:
        text = f"Process set provided does not exist: {given.ranks} has ranks that do not exist in a world of {size}"
        raise ArgumentError(text)


global_process_set = ProcessSet()
"""All ranks."""


def named_ranks(process_set: object, size: int) -> tuple[int, ...]:
    """Returns the members of a value that may not be a valid process set; none for the whole world.

    A rank that passes an unusable value must still notify the ranks that wait for it, and only those. So a value that
    names ranks stands for those of them that exist, if there are at least two; any other value stands for the whole
    world.
    """
    given = getattr(process_set, "ranks", process_set)
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        return ()
    try:
        named = sorted({operator.index(rank) for rank in given})
    except TypeError:
        return ()
    ranks = tuple(rank for rank in named if 0 <= rank < size)
    lost = len(ranks) < len(named)
    return () if len(ranks) == size or (lost and len(ranks) < 2) else ranks
