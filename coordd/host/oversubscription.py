"""Oversubscription: compares the number of computing threads on a host with the number of its cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordd.host.cores import cores_here

__all__ = ["Crowd", "oversubscribed", "threads_asked"]


def oversubscribed(cores: int, local_size: int, threads: int) -> bool:
    """Returns whether the ranks of a host have more threads than cores, so that some threads always wait for a core.

    Args:
        cores: number of cores that these ranks may use together.
        local_size: ranks of the host.
        threads: compute threads of each rank.
    """
    return local_size * threads > cores


def threads_asked(environment: Mapping[str, str]) -> int:
    """Returns the number of threads that the user has chosen for each process; 0 if not set."""
    outermost = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if outermost.isdecimal() else 0


class Crowd(NamedTuple):
    """The ranks of this host on its cores; the attributes are the arguments of `oversubscribed`, in order."""

    cores: int
    local_size: int
    threads: int

    @classmethod
    def of(cls, pids: Sequence[int], environment: Mapping[str, str]) -> Crowd:
        """Counts running ranks; a rank without a set number of threads has one for each core that it may use.

        Args:
            pids: the processes of all ranks of this host.
            environment: usually ``os.environ``.
        """
        return cls(cores_here(*pids).usable, len(pids), threads_asked(environment) or cores_here().usable)

    @property
    def advice(self) -> str:
        """What to do about too many threads; "" if there are not too many."""
        if not oversubscribed(*self):
            return ""
        each = max(1, self.cores // self.local_size)
        threads = f" of {self.threads} threads" if self.threads > 1 else ""
        text = f"{self.local_size} ranks{threads} take turns on {self.cores} of this host's cores: "
        if self.threads > each:
            return text + f"set OMP_NUM_THREADS={each}, or start the ranks with `coordd run`, which does"
        return text + "start fewer here, or ask for more cores"
