"""Membership as a value: who takes part, and who sits where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """All ranks of a job, seen by one of them.

    A change of membership is another `World` with another epoch, and another daemon.
    """

    rank: int
    hosts: tuple[str, ...]
    epoch: int = 0

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
        """Ranks on this rank's host, ascending, this one included."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.host)

    @cached_property
    def _peers(self) -> tuple[int, ...]:
        """Ranks that have the same local rank as this one, one a host, ascending."""
        place: dict[str, int] = {}
        found = []
        for rank, host in enumerate(self.hosts):
            if place.setdefault(host, 0) == self.local_rank:
                found.append(rank)
            place[host] += 1
        return tuple(found)

    @property
    def local_rank(self) -> int:
        """Place among the ranks of this host."""
        return self.neighbours.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return len(self.neighbours)

    @property
    def cross_rank(self) -> int:
        """Place among the ranks that have the same local rank on their hosts."""
        return self._peers.index(self.rank)

    @property
    def cross_size(self) -> int:
        """Number of hosts that have a rank with this local rank."""
        return len(self._peers)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len({self.hosts.count(host) for host in self.hosts}) == 1
