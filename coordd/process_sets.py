"""Which ranks take part in an operation: a value, identified by its members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index

from coordd.errors import ArgumentError

__all__ = ["ProcessSet", "global_process_set"]


@dataclass(frozen=True, init=False)
class ProcessSet:
    """Some ranks, ascending; without ranks, all of them.

    Two sets with the same members are the same set, so there is nothing to register.
    """

    ranks: tuple[int, ...]

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        """Makes a set.

        Raises:
            ArgumentError: a rank is negative or given twice.
        """
        members = tuple(sorted(map(index, ranks)))  # Python's own integers, which messages can carry
        if len(set(members)) < len(members) or any(rank < 0 for rank in members):
            text = f"a process set has each rank once, and none below 0: {members}"
            raise ArgumentError(text)
        object.__setattr__(self, "ranks", members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)

    def count(self, size: int) -> int:
        """How many members it has in a world of ``size`` ranks."""
        return len(self.ranks) or size

    def members(self, *, rank: int, size: int) -> tuple[int, ...]:
        """Returns the members as requests carry them: empty for the whole world of ``size`` ranks.

        Raises:
            ArgumentError: there are no such ranks, or ``rank`` is not one of them.
        """
        if not self.ranks or self.ranks == tuple(range(size)):
            return ()
        if self.ranks[-1] >= size:
            text = f"Process set provided does not exist: {self.ranks} has ranks that do not exist in a world of {size}"
            raise ArgumentError(text)
        if rank not in self.ranks:
            text = f"Rank {rank} is not a member of the provided process set {self.ranks}"
            raise ArgumentError(text)
        return self.ranks


global_process_set = ProcessSet()
"""All ranks."""
