"""Membership as a value: the ranks of a job, and the host of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """All ranks of a job, as seen by one of them.

    A change of membership is another `World` with another epoch, and another daemon.

    Attributes:
        rank: this rank.
        hosts: a name for each rank; ranks of one name share memory, and know each other's process ids.
        epoch: which world this is.
        machines: a name for each rank by which local ranks are counted: containers of one machine may share its devices
            and network, but no memory. Empty means the hosts.
    """

    rank: int
    hosts: tuple[str, ...]
    epoch: int = 0
    machines: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def host(self) -> str:
        """The host of this rank."""
        return self.hosts[self.rank]

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """Ranks that share memory with this one, ascending, this one included."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.host)

    @cached_property
    def _places(self) -> tuple[str, ...]:
        return self.machines or self.hosts

    @cached_property
    def _together(self) -> tuple[int, ...]:
        """Ranks on this rank's machine, ascending, this one included."""
        return tuple(rank for rank, place in enumerate(self._places) if place == self._places[self.rank])

    @cached_property
    def _peers(self) -> tuple[int, ...]:
        """Ranks that have the same local rank as this one, one per machine, ascending."""
        place: dict[str, int] = {}
        found = []
        for rank, machine in enumerate(self._places):
            if place.setdefault(machine, 0) == self.local_rank:
                found.append(rank)
            place[machine] += 1
        return tuple(found)

    @property
    def local_rank(self) -> int:
        """Place among the ranks of this machine."""
        return self._together.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this machine."""
        return len(self._together)

    @property
    def cross_rank(self) -> int:
        """Place among the ranks that have the same local rank on their machines."""
        return self._peers.index(self.rank)

    @property
    def cross_size(self) -> int:
        """Number of machines that have a rank with this local rank."""
        return len(self._peers)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every machine has the same number of ranks."""
        return len({self._places.count(place) for place in self._places}) == 1
