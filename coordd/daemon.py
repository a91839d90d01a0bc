"""The daemon: one thread a process that owns all communication.

Framework threads put entries into its inbox and wait on handles; nothing else crosses the line. It never blocks on one
operation while another could progress, and sleeps without using the CPU when there is nothing to do.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from coordd.account import account, process_state
from coordd.bell import Bell
from coordd.config import Config, knobs
from coordd.control.protocol import Lost
from coordd.coordinator import Coordinator
from coordd.errors import (
    CoorddError,
    ForkedProcessError,
    NotInitializedError,
    PeerError,
    ShutdownError,
    StartError,
)
from coordd.execution import Flights
from coordd.handles import Handle
from coordd.inbox import Inbox
from coordd.mailbox import Letter, Mailbox
from coordd.member import Member
from coordd.messages import Abort, Failure, Goodbye, Hello, Inquiry, Message, Overdue, Plan, StallReport, Welcome
from coordd.patience import Patience
from coordd.rendezvous import Link, Rendezvous
from coordd.stall import StallWatch, tell
from coordd.table import Entry
from coordd.version import VERSION
from coordd.world import World

__all__ = ["Daemon"]

log = logging.getLogger("coordd")

Work = Entry | Letter | Callable[[], None]

_ANSWER_SECONDS = 2.0
_FAREWELL_SECONDS = 1.0


class Daemon:
    """Owns the link of one rank; `start` it, `submit` to it, `stop` it."""

    def __init__(self, config: Config, meet: Rendezvous) -> None:
        """Prepares a daemon.

        Args:
            config: its settings; they must be equal on all ranks.
            meet: how it finds the other ranks.
        """
        self.config = config
        self.world = World(0, (os.uname().nodename,))
        self.failure: Failure | None = None
        self.failing = False
        self._meet = meet
        self._pid = os.getpid()
        self._bell = Bell()
        self._inbox: Inbox[Work] = Inbox(self._bell, window=config.cycle_ms / 1e3)
        self._thread = threading.Thread(target=self._run, name="coordd", daemon=True)
        self._started = threading.Event()
        self._ended = threading.Event()
        self._broken = threading.Event()
        self._start_error: BaseException | None = None
        self._leaving = False
        self._stopping = False
        self._link: Link | None = None
        self._lost: set[int] = set()
        self._watched: list[tuple[int, threading.Event]] = []
        self._pids: tuple[int, ...] = ()
        self._stall = StallWatch(config.stall_seconds)
        self._asked: float | None = None
        self._parting: float | None = None
        self._awaited = False
        self._next_look = 0.0
        self._patience = Patience()
        self._wreck: list[object] = []

    # What framework threads use.

    def start(self) -> None:
        """Starts the thread and waits until all ranks are there.

        Raises:
            StartError: they did not come in time, or do not fit together.
        """
        self._thread.start()
        if not self._started.wait(self.config.start_seconds):
            text = f"the ranks did not find each other within {self.config.start_seconds:g} s (start_seconds)"
            raise StartError(text)
        if self._start_error is not None:
            raise self._start_error

    def submit(self, entry: Entry) -> None:
        """Announces a tensor; its handle is resolved or failed later, on every path.

        Raises:
            PeerError: another rank has failed.
            NotInitializedError: this daemon was stopped.
            ForkedProcessError: this is a forked child.
        """
        self._check_usable()
        self._inbox.put(entry)

    def post(self, letter: Letter) -> None:
        """Starts a matched send or receive; raises like `submit`."""
        self._check_usable()
        self._do(letter)

    def hurry(self) -> None:
        """Ends the batching window: somebody waits."""
        self._inbox.hurry()

    def handle(self, name: str) -> Handle[np.ndarray]:
        """Makes a handle whose waiters hurry this daemon."""
        return Handle(name, hurry=self.hurry)

    def fail(self, reason: str, traceback: str = "") -> None:
        """Tells all ranks that this one has failed, unless the job had failed before."""
        if os.getpid() == self._pid and self._thread.is_alive() and self.failure is None:
            failure = Failure(self.world.rank, reason, traceback)
            self.failing = True
            self._do(lambda: self._report_failure(failure))

    def stop(self) -> None:
        """Leaves in step with the other ranks: blocks until all have stopped, or the job has failed."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        self._leaving = True
        self._do(self._say_goodbye)
        self._ended.wait()
        self._thread.join()

    def await_failure(self, seconds: float) -> int:
        """Waits until the first failure is known to this rank; returns the rank that is to blame."""
        self._broken.wait(seconds)
        return self.failure.rank if self.failure is not None else self.world.rank

    def end(self, seconds: float) -> bool:
        """Ends the thread without waiting for other ranks; says whether it ended in time."""
        self._stopping = True
        self._bell.ring()
        return self._ended.wait(seconds)

    def wait_for_loss(self, rank: int, seconds: float) -> None:
        """Waits, at most so long, until the process of a rank is gone; on other ranks than 0, until that of rank 0 is."""
        watched = rank if self.world.rank == 0 else 0
        gone = threading.Event()
        self._do(lambda: self._watch_for(watched, gone))
        gone.wait(seconds)

    @property
    def alive(self) -> bool:
        """Whether operations can be submitted."""
        return self._thread.is_alive() and not self._leaving and self.failure is None

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError
        if self.failure is not None:
            raise _peer_error(self.failure)
        if self._leaving or self._ended.is_set():
            raise NotInitializedError

    def _do(self, work: Work) -> None:
        """Leaves work that is not to wait for the batching window."""
        self._inbox.put(work)
        self._inbox.hurry()

    # What the daemon's thread does.

    def _run(self) -> None:
        try:
            self._connect()
            while not self._stopping:
                self._cycle()
        except BaseException as error:
            self._crash(error)
        finally:
            self._finish()

    def _cycle(self) -> None:
        self._announce()
        self._watch()
        self._listen()
        if self._member.stopped:
            self._part()
        moved = self._flights.advance() | self._mailbox.advance()
        self._rest(moved=moved)

    def _connect(self) -> None:
        self._link = self._meet(self._bell.ring)
        transport = self._link.transport
        self._control = self._link.control
        self._bell.watch(self._control.descriptors)
        self.world = World(transport.rank, ("",) * transport.size)
        self._member = Member(transport.rank, cache_capacity=self.config.cache_capacity)
        self._flights = Flights(
            transport.collective,
            rank=transport.rank,
            size=transport.size,
            chunk=self.config.chunk_kb << 10,
            landed=self._landed,
        )
        self._mailbox = Mailbox(transport.matched, transport.rank)
        self._coordinator = self._coordinate() if transport.rank == 0 else None
        self._tell(Hello(VERSION, _digest(self.config), os.getpid(), os.uname().nodename))

    def _coordinate(self) -> Coordinator:
        return Coordinator(
            self.world.size,
            cache_capacity=self.config.cache_capacity,
            fusion_bytes=int(self.config.fusion_mb * (1 << 20)),
            abort_seconds=self.config.stall_abort_seconds,
        )

    def _announce(self) -> None:
        """Takes in what framework threads have left, and reports what is new."""
        items = self._inbox.take()
        if not items:
            return
        self._awaited = self._inbox.awaited
        self._patience.restart()
        entries = [item for item in items if isinstance(item, Entry)]
        if self.failure is not None:
            for entry in entries:
                entry.handle.fail(_peer_error(self.failure))
        elif (report := self._member.announce(entries)) is not None:
            self._tell(report)
        for item in items:
            if isinstance(item, Letter):
                self._mailbox.start(item)
            elif not isinstance(item, Entry):
                item()

    def _lose(self, rank: int) -> None:
        """Notes that the process of a rank is gone, and tells those who wait for that."""
        self._lost.add(rank)
        for watched, gone in self._watched:
            if watched == rank:
                gone.set()

    def _watch_for(self, rank: int, gone: threading.Event) -> None:
        self._watched.append((rank, gone))
        if rank in self._lost:
            gone.set()

    def _tell(self, message: Message) -> None:
        """Sends to the coordinator."""
        if self._coordinator is not None:
            self._coordinator.hear(0, message, now=time.monotonic())
        else:
            self._control.send(0, message)

    def _listen(self) -> None:
        """Takes control messages in; on rank 0 the coordinator hears them, and says what is to be done."""
        arrived = self._control.receive()
        if self._coordinator is None:
            for sender, message in arrived:
                self._obey(sender, message)
            return
        now = time.monotonic()
        for sender, message in arrived:
            if isinstance(message, Lost):
                self._lose(sender)
            self._coordinator.hear(sender, message, now=now)
        for rank, message in self._coordinator.turn(now):
            if rank == 0:
                self._obey(0, message)
            else:
                self._control.send(rank, message)

    def _obey(self, sender: int, message: Message | Lost) -> None:
        match message:
            case Plan():
                for bucket in self._member.follow(message):
                    self._flights.start(bucket)
            case Abort():
                self._break(message.failure)
            case Inquiry():
                self._tell(account(self.world.rank, self._member.table.last))
            case StallReport():
                self._asked = None
                log.warning("%s", tell(message))
            case Welcome():
                self._enter(message)
            case Lost() if not self._member.stopped:
                self._lose(sender)
                self._break(Failure(0, f"({self._place(0)}) died: its connection closed without a goodbye"))

    def _enter(self, welcome: Welcome) -> None:
        self.world = World(self.world.rank, welcome.hosts)
        self._pids = welcome.pids
        if welcome.refusal:
            self._start_error = StartError(welcome.refusal)
            self._stopping = True
        self._started.set()

    def _landed(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._member.table.take(entry.request.name)
        self._stall.observe(time.monotonic() - entries[0].handle.submitted)

    def _place(self, rank: int) -> str:
        return f"pid {self._pids[rank]} on {self.world.hosts[rank]}" if self._pids else "not yet arrived"

    # Stalls.

    def _oldest(self) -> float | None:
        """When the operation was submitted that has waited longest."""
        times = [since for since, _ in self._mailbox.waiting()]
        if (entry := self._member.table.oldest()) is not None:
            times.append(entry.handle.submitted)
        return min(times, default=None)

    def _watch(self) -> None:
        """Asks what the others do when something of ours has waited too long."""
        if not self.config.stall_check or self.failure is not None:
            return
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + min(0.1, self._stall.limit / 8)
        if self._asked is not None and now > self._asked + _ANSWER_SECONDS:
            self._asked = None
            self._report_silence(now)
        oldest = self._oldest()
        if oldest is None or not self._stall.overdue(now - oldest):
            return
        limit = now - self._stall.limit
        names = tuple(entry.request.name for entry in self._member.table if entry.handle.submitted <= limit)
        matched = tuple(waiting for since, waiting in self._mailbox.waiting() if since <= limit)
        self._asked = now
        self._tell(Overdue(now - oldest, names, matched))

    def _report_silence(self, now: float) -> None:
        """Says what can be said without the coordinator."""
        oldest = self._oldest()
        state = process_state(self._pids[0], self.world.hosts[0], self.world.host)
        seen = f"; the operating system sees it as {state}" if state else ""
        names = ", ".join(repr(entry.request.name) for entry in list(self._member.table)[:6])
        log.warning(
            "no progress for %.1f s: %s waiting, and the coordinator, rank 0 (%s), does not answer%s",
            now - (oldest or now),
            names,
            self._place(0),
            seen,
        )

    # Failure and farewell.

    def _report_failure(self, failure: Failure) -> None:
        self._tell(Abort(failure))
        self._break(failure)

    def _break(self, failure: Failure) -> None:
        """Ends everything that is under way with the cause; the thread lives on to see the others go."""
        if self.failure is not None:
            return
        self.failure = failure
        self.failing = True
        self._broken.set()
        self._fail_all(lambda _: _peer_error(failure))

    def _fail_all(self, error: Callable[[str], BaseException]) -> None:
        # MPI may still write into the buffers of what was in flight, so they are kept until the process ends.
        self._wreck.append((self._flights.clear(), self._member.table.clear()))
        flights, waiting = self._wreck[-1]
        for entry in dict.fromkeys([*flights, *waiting]):
            entry.handle.fail(error(entry.request.name))
        for letter in self._mailbox.clear():
            self._wreck.append(letter)
            letter.handle.fail(error(letter.name))

    def _say_goodbye(self) -> None:
        """Leaves: what other ranks have not announced by now fails, here and there."""
        if self.failure is not None:
            self._stopping = True
        else:
            self._tell(Goodbye())

    def _part(self) -> None:
        """Ends the thread once all ranks have left and what is under way has landed."""
        if not self._flights and not self._mailbox:
            self._stopping = True
        elif self._parting is None:
            self._parting = time.monotonic() + _FAREWELL_SECONDS
        elif time.monotonic() > self._parting:
            log.warning("left with sends or receives that no other rank has matched")
            self._stopping = True

    def _crash(self, error: BaseException) -> None:
        """Makes an error of the daemon itself everybody's: no waiter is left alone."""
        if not self._started.is_set():
            self._start_error = error
            self._started.set()
            return
        log.critical("the daemon of rank %d failed", self.world.rank, exc_info=error)
        failure = Failure(self.world.rank, f"failed in its daemon: {type(error).__name__}: {error}")
        self._break(failure)
        try:
            self._tell(Abort(failure))
            self._listen()
        except Exception:
            log.exception("the other ranks could not be told")

    def _finish(self) -> None:
        """Closes the link; nobody waits any more."""
        self._leaving = True
        if self._link is not None:
            unmatched = bool(self._mailbox)
            self._fail_all(ShutdownError)
            for item in self._inbox.drain():
                if not callable(item):
                    item.handle.fail(ShutdownError(item.handle.name))
            self._control.close()
            self._link.transport.close(failed=self.failure is not None or unmatched)
        for _, gone in self._watched:
            gone.set()
        self._bell.close()
        self._ended.set()

    # Sleep.

    def _rest(self, *, moved: bool) -> None:
        """Sleeps as long as nothing can happen."""
        if self._stopping:
            return
        if moved:
            self._patience.restart()
        elif self._awaited and self._patience.short:
            self._patience.spin()
        elif self._flights or self._mailbox:
            self._patience.doze(self._bell)
        elif not self._control.ready():
            self._inbox.sleep(self._deadline())

    def _deadline(self) -> float | None:
        """Seconds until time itself gives the daemon something to do; None for never."""
        now = time.monotonic()
        times = []
        if self._coordinator is not None and self._coordinator.deadline is not None:
            times.append(self._coordinator.deadline - now)
        if self._asked is not None:
            times.append(self._asked + _ANSWER_SECONDS - now)
        if self.config.stall_check and (oldest := self._oldest()) is not None:
            times.append(self._stall.remaining(now - oldest))
        return max(0.001, min(times)) if times else None


def _peer_error(failure: Failure) -> CoorddError:
    return PeerError(failure.rank, failure.reason, failure.traceback)


def _digest(config: Config) -> str:
    """A short print of the settings, equal where they are."""
    text = ";".join(f"{knob.name}={getattr(config, knob.name)}" for knob in knobs() if knob.name not in {"log_level", "interface"})
    return hashlib.sha256(text.encode()).hexdigest()[:12]
