"""The daemon's state that framework threads may read.

The daemon's thread writes it, and all threads read it; other threads write only that they leave or fail, and the
handler of status queries.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from coordd.collectives.scheduler import Flights
from coordd.daemon.message_queue import Inbox
from coordd.daemon.peer_to_peer import Mailbox
from coordd.errors import PeerError
from coordd.host.world import World
from coordd.monitoring.counters import Traffic
from coordd.monitoring.straggler import Lead
from coordd.negotiation.tensor_table import Entry
from coordd.negotiation.worker import Member
from coordd.ops.messages import Account, Failure, Inquiry
from coordd.transport.shared_memory.host_memory import Commons

__all__ = ["Parts", "Series", "Status", "peer_error", "series_of"]

_NUMBERED = re.compile(r".*?\.noname\.(?:\([^)]*\)\.)?", re.DOTALL)
Series = tuple[Any, ...]
"""Operations that match in order: those of one name, unnamed ones of a kind and a set, an optimizer's steps."""


class Parts(NamedTuple):
    """The parts of the daemon, for other threads to read without changing them."""

    member: Member
    flights: Flights
    mailbox: Mailbox
    commons: Commons | None
    inbox: Inbox[Any]


class Status:
    """The state of one daemon."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pids: tuple[int, ...] = ()
        self.start_error: BaseException | None = None
        self.failure: Failure | None = None
        self.parts: Parts | None = None
        self.traffic = Traffic()
        self.lead = Lead()
        self.desk: Callable[[Inquiry | Account], None] = lambda _: None
        """Handles other ranks' status queries and answers; the daemon's thread calls it, so it must not block."""
        self.absent: Callable[[], list[int]] = list
        """Lists the ranks of this host that have not started, if the host's ranks are known."""
        self.script = threading.main_thread().ident or 0
        """The thread in which the script runs."""
        self.failing = False
        """Whether the job has failed, or this rank is about to report that it has."""
        self.left_off: dict[Series, str] = {}
        """The work that ``sys.exit(0)`` has interrupted, by what is out of step then; see `Daemon.broken_off`."""
        self.half_done = False
        """Whether some of that work is not submitted, so that this rank cannot take part in anything any more."""
        self.leaving = False
        self.stopping = False
        self.abandoned = False
        """Whether the script has given up the start, so that this rank leaves without the others."""
        self.started = threading.Event()
        self.over = threading.Event()
        """Set when no operation can complete any more: the thread has ended, or the job has failed."""
        self.ended = threading.Event()

    def count(self, entries: Sequence[Entry], now: float) -> None:
        """Counts entries that completed together."""
        self.traffic.count(entries)
        self.lead.observe(entries, now)

    def place(self, rank: int) -> str:
        """Returns where a rank's process runs."""
        return f"pid {self.pids[rank]} on {self.world.hosts[rank]}" if self.pids else "not yet arrived"


def series_of(name: str) -> Series:
    """Returns the series of an operation: all unnamed ones of its kind and process set, or all of its name."""
    found = _NUMBERED.match(name)
    return (found[0] if found else name,)


def peer_error(failure: Failure) -> PeerError:
    """Creates the error for waiting threads; a new one each time, because exceptions collect tracebacks."""
    return PeerError(failure.rank, failure.reason, failure.traceback)
