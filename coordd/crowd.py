"""How many threads compute on a host, beside how many cores: more of them take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordd.cores import cores_here

__all__ = ["Crowd", "oversubscribed", "threads_asked"]


def oversubscribed(cores: int, local_size: int, threads: int) -> bool:
    """Says whether the ranks of a host have more threads than cores, so that some always wait for others to pause.

    Args:
        cores: what these ranks may use together.
        local_size: ranks of the host.
        threads: with which each of them computes.
    """
    return local_size * threads > cores


def threads_asked(environment: Mapping[str, str]) -> int:
    """Reads the number of threads that the user has chosen for each process; 0 is none."""
    outermost = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if outermost.isdecimal() else 0


class Crowd(NamedTuple):
    """The ranks of this host on its cores; the attributes are what `oversubscribed` wants, in order."""

    cores: int
    local_size: int
    threads: int

    @classmethod
    def of(cls, pids: Sequence[int], environment: Mapping[str, str]) -> Crowd:
        """Looks at running ranks; a rank that was told no number of threads has one for each core that it may use.

        Args:
            pids: the processes of all ranks of this host.
            environment: usually ``os.environ``.
        """
        return cls(cores_here(*pids).usable, len(pids), threads_asked(environment) or cores_here().usable)

    @property
    def advice(self) -> str:
        """What to do about too many threads; empty if there are not."""
        if not oversubscribed(*self):
            return ""
        each = max(1, self.cores // self.local_size)
        threads = f" of {self.threads} threads" if self.threads > 1 else ""
        text = f"{self.local_size} ranks{threads} take turns on {self.cores} of this host's cores: "
        if self.threads > each:
            return text + f"set OMP_NUM_THREADS={each}, or start the ranks with `coordd run`, which does"
        return text + "start fewer here, or ask for more cores"
