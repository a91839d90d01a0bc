"""What framework threads may know of the daemon's thread: written by that thread, read by all."""

from __future__ import annotations

import threading

from coordd.errors import PeerError
from coordd.messages import Failure
from coordd.world import World

__all__ = ["Status", "peer_error"]


class Status:
    """Where one daemon stands."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pids: tuple[int, ...] = ()
        self.start_error: BaseException | None = None
        self.failure: Failure | None = None
        self.failing = False
        """Whether the job has failed, or this rank is about to tell that it has."""
        self.leaving = False
        self.stopping = False
        self.started = threading.Event()
        self.over = threading.Event()
        """Set when nothing can be completed any more: the thread has ended, or the job has failed."""
        self.ended = threading.Event()

    def place(self, rank: int) -> str:
        """Says where a rank's process is."""
        return f"pid {self.pids[rank]} on {self.world.hosts[rank]}" if self.pids else "not yet arrived"


def peer_error(failure: Failure) -> PeerError:
    """Makes the error that those get who wait; a new one each time, for exceptions collect tracebacks."""
    return PeerError(failure.rank, failure.reason, failure.traceback)
