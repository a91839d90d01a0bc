"""What framework threads may know of the daemon's thread.

That thread writes it, and all read it; others write only that they leave or fail, and who takes questions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from coordd.errors import PeerError
from coordd.execution import Flights
from coordd.inbox import Inbox
from coordd.lead import Lead
from coordd.mailbox import Mailbox
from coordd.member import Member
from coordd.messages import Account, Failure, Inquiry
from coordd.table import Entry
from coordd.traffic import Traffic
from coordd.transport.commons import Commons
from coordd.world import World

__all__ = ["Parts", "Status", "peer_error"]


class Parts(NamedTuple):
    """What the thread works with, for others to look at without touching."""

    member: Member
    flights: Flights
    mailbox: Mailbox
    commons: Commons | None
    inbox: Inbox[Any]


class Status:
    """Where one daemon stands."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pids: tuple[int, ...] = ()
        self.start_error: BaseException | None = None
        self.failure: Failure | None = None
        self.parts: Parts | None = None
        self.traffic = Traffic()
        self.lead = Lead()
        self.desk: Callable[[Inquiry | Account], None] = lambda _: None
        """Takes what other ranks ask of this one and answer to it; called by the thread, so it must not block."""
        self.absent: Callable[[], list[int]] = list
        """Lists the ranks that have not begun on this host, if anything is known of its ranks."""
        self.script = threading.main_thread().ident or 0
        """The thread in which the script runs."""
        self.failing = False
        """Whether the job has failed, or this rank is about to tell that it has."""
        self.leaving = False
        self.stopping = False
        self.abandoned = False
        """Whether the script has given up the start, so that this rank leaves without the others."""
        self.started = threading.Event()
        self.over = threading.Event()
        """Set when nothing can be completed any more: the thread has ended, or the job has failed."""
        self.ended = threading.Event()

    def count(self, entries: Sequence[Entry], now: float) -> None:
        """Counts what has landed together."""
        self.traffic.count(entries)
        self.lead.observe(entries, now)

    def place(self, rank: int) -> str:
        """Says where a rank's process is."""
        return f"pid {self.pids[rank]} on {self.world.hosts[rank]}" if self.pids else "not yet arrived"


def peer_error(failure: Failure) -> PeerError:
    """Makes the error that those get who wait; a new one each time, for exceptions collect tracebacks."""
    return PeerError(failure.rank, failure.reason, failure.traceback)
