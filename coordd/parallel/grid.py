"""Groups of ranks in the user's API: process sets that know this rank, and grids of ranks with named axes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from coordd import api
from coordd.errors import ArgumentError, spans
from coordd.ops import process_sets
from coordd.ops.checks import whole
from coordd.parallel.collective_calls import CollectiveCall, collective

__all__ = ["Grid", "ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet(process_sets.ProcessSet):
    """Some ranks, ascending; without an argument, all of them.

    Two sets with the same members are the same set. Sets need no registration: an operation identifies its set by the
    members, and no set waits for another.
    """

    def __init__(self, ranks_or_comm: Any = None) -> None:
        """Creates a set of ranks, or of the ranks of an mpi4py communicator.

        Raises:
            ArgumentError: there are no ranks, or one of them is negative, duplicate, or not an integer.
        """
        super().__init__(_ranks(ranks_or_comm) if hasattr(ranks_or_comm, "Get_group") else ranks_or_comm)

    def size(self) -> int:
        """Returns the number of members."""
        return self.count(api.size())

    def included(self) -> bool:
        """Returns whether this rank is a member."""
        return not self.ranks or api.rank() in self.ranks

    def rank(self) -> int:
        """Returns this rank's index among the members, from 0; -1 if it is not a member."""
        if not self.included():
            return -1
        return self.ranks.index(api.rank()) if self.ranks else api.rank()

    @property
    def process_set_id(self) -> str:
        """Identifier of the set: its members."""
        return ",".join(map(str, self.ranks)) or "all"


def _ranks(communicator: Any) -> Iterable[int]:
    """Returns the members of a communicator as ranks of ``MPI.COMM_WORLD``."""
    from mpi4py import MPI

    ranks: list[int] = MPI.Group.Translate_ranks(communicator.Get_group(), None, MPI.COMM_WORLD.Get_group())
    return ranks


global_process_set = ProcessSet()
"""All ranks."""


@collective("add_process_set", everywhere=True)
def add_process_set(call: CollectiveCall, process_set: process_sets.ProcessSet | Iterable[int]) -> ProcessSet:
    """Creates a process set of ranks of this job, on all ranks together, and checks that all ranks give the same one.

    It is kept for Horovod's programs; sets need no registration: `ProcessSet` alone creates one, too.

    Raises:
        ArgumentError: there are no such ranks.
        MismatchError: on all ranks: they have given different sets.
        RefusedError: another rank has raised an error here.
    """
    given = process_set.ranks or None if isinstance(process_set, process_sets.ProcessSet) else process_set
    found = ProcessSet(given)
    if found.ranks and found.ranks[-1] >= api.size():
        text = f"process set {found.ranks} has ranks that do not exist in a world of {api.size()}"
        raise ArgumentError(text)
    call.lines.append(f"ranks {spans(found.ranks) or 'of the whole world'}")
    return found


def remove_process_set(process_set: process_sets.ProcessSet) -> bool:
    """Returns whether a process set may be removed: any but that of all ranks. There is nothing to remove."""
    return bool(process_set.ranks)


class Grid:
    """All ranks as a grid with named axes, such as ``Grid(dp=2, pp=2, tp=2)``; the last axis varies fastest.

    An attribute named like an axis, ``grid.dp``, is the process set of the ranks that differ from this one along it
    only.
    """

    def __init__(self, **axes: int) -> None:
        """Lays out the grid.

        Args:
            axes: lengths by name; one of them may be -1, for the rest.

        Raises:
            ArgumentError: the product of the lengths is not the number of ranks.
        """
        size = api.size()
        if not axes or [*axes.values()].count(-1) > 1:
            text = "a grid has axes, of which one may be -1 for whatever is left, as in Grid(dp=-1, tp=2)"
            raise ArgumentError(text)
        axes = {name: whole(length, f"the length of axis {name}", least=-1) for name, length in axes.items()}
        known = math.prod(length for length in axes.values() if length != -1)
        self.axes = {name: size // max(known, 1) if length == -1 else length for name, length in axes.items()}
        wanted = math.prod(self.axes.values())
        if wanted != size or any(length < 1 for length in self.axes.values()):
            shape = " x ".join(f"{name}={length}" for name, length in axes.items()) or "nothing"
            text = f"a grid of {shape} has {wanted} places, and there are {size} ranks: make them equal"
            raise ArgumentError(text)
        if taken := [name for name in self.axes if hasattr(type(self), name) or name.startswith("_")]:
            text = f"no axis can be called {', '.join(taken)}"
            raise ArgumentError(text)
        self._place = self._unfold(api.rank())

    def _unfold(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank."""
        found = {}
        for name, length in reversed(self.axes.items()):
            rank, found[name] = divmod(rank, length)
        return dict(reversed(found.items()))

    @property
    def place(self) -> dict[str, int]:
        """This rank's coordinates by axis."""
        return dict(self._place)

    def along(self, *names: str, of: int | None = None) -> ProcessSet:
        """Returns the ranks that differ from this one, or from the rank ``of``, along these axes only.

        Raises:
            ArgumentError: there is no such axis.
        """
        if unknown := [name for name in names if name not in self.axes]:
            text = f"no axis {', '.join(unknown)}: there are {', '.join(self.axes)}"
            raise ArgumentError(text)
        here = self._place if of is None else self._unfold(of)
        fixed = {name: at for name, at in here.items() if name not in names}
        return ProcessSet(rank for rank in range(api.size()) if fixed.items() <= self._unfold(rank).items())

    def rank(self, **place: int) -> int:
        """Returns the rank at some coordinates; other axes have this rank's coordinates.

        Raises:
            ArgumentError: there is no such axis or coordinate.
        """
        found = 0
        for name, length in self.axes.items():
            at = place.get(name, self._place[name])
            if not 0 <= at < length:
                text = f"{name}={at} is outside the grid: {name} goes from 0 to {length - 1}"
                raise ArgumentError(text)
            found = found * length + at
        if unknown := sorted(place.keys() - self.axes.keys()):
            text = f"no axis {', '.join(unknown)}: there are {', '.join(self.axes)}"
            raise ArgumentError(text)
        return found

    def __getattr__(self, name: str) -> Any:
        axes = self.__dict__.get("axes", {})
        if name in axes:
            return self.along(name)
        raise AttributeError(f"no axis {name!r}: there are {', '.join(axes)}")

    def __repr__(self) -> str:
        return f"Grid({', '.join(f'{name}={length}' for name, length in self.axes.items())})"
