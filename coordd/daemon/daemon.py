"""The daemon as framework threads see it: one thread per process that owns all communication.

Framework threads put work into its message queue and wait on handles; nothing else is shared.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from coordd.collectives.in_flight_check import seal
from coordd.config import Config
from coordd.daemon.event_loop import Loop, Work
from coordd.daemon.message_queue import Inbox
from coordd.daemon.peer_to_peer import Letter
from coordd.daemon.rendezvous import Rendezvous
from coordd.daemon.shared_state import Series, Status, peer_error, series_of
from coordd.daemon.wakeup import Bell
from coordd.errors import ForkedProcessError, NotInitializedError, StartError, brief, spans
from coordd.host.world import World
from coordd.monitoring.stacks import await_end, is_stopped
from coordd.negotiation.tensor_table import Entry
from coordd.ops.handles import Handle, check_may_wait, exits, raised_by_coordd
from coordd.ops.messages import Failure, Message, Refused
from coordd.transport.shared_memory.host_memory import Commons
from coordd.transport.shared_memory.loans import blank
from coordd.transport.shared_memory.notes import Notes

__all__ = ["Daemon"]

_END_SECONDS = 3.0
_GIVE_UP_SECONDS = 0.3
_LOOK_SECONDS = 0.1


class _Unbroken:
    """Context manager of `Daemon.unbroken`; a class, because each step enters it and a generator takes longer."""

    __slots__ = ("_daemon", "_series", "_what")

    def __init__(self, daemon: Daemon, what: str, series: Series) -> None:
        self._daemon, self._what, self._series = daemon, what, series

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> None:
        """Notes an exception."""
        if error is not None:
            self._daemon.broken_off(error, self._what, series=self._series)


class Daemon:
    """Owns the background thread of one rank; `start` it, `submit` to it, `stop` it."""

    def __init__(self, config: Config, meet: Rendezvous) -> None:
        """Prepares a daemon.

        Args:
            config: its settings; they must be equal on all ranks.
            meet: how it finds the other ranks.
        """
        self.config = config
        self._pid = os.getpid()
        self._status = Status(World(0, (os.uname().nodename,)))
        self._bell = Bell()
        self._inbox: Inbox[Work] = Inbox(self._bell, window=config.cycle_ms / 1e3, limit=config.batch_mb * (1 << 20))
        self._loop = Loop(config, meet, inbox=self._inbox, bell=self._bell, status=self._status)
        self._thread = threading.Thread(target=self._loop.run, name="coordd", daemon=True)
        self._told: list[Handle[Any]] = []
        self._on_broken_wait = self.note_broken_wait  # bound once: each gradient has a handle

    @property
    def world(self) -> World:
        """The ranks of the job."""
        return self._status.world

    @property
    def status(self) -> Status:
        """The state that its thread publishes."""
        return self._status

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Process IDs of the ranks on this host, this one's included."""
        return tuple(self._status.pids[rank] for rank in self.world.neighbours)

    @property
    def failing(self) -> bool:
        """Whether the job has failed."""
        return self._status.failing

    def start(self) -> None:
        """Starts the thread and waits for all ranks.

        Raises:
            StartError: not all ranks arrived in time, or they do not fit together.
            PeerError: another rank could not start.
            DeadlockError: the calling thread is the thread of another daemon.
        """
        check_may_wait("init()")
        try:
            self._await_start()
        except BaseException:  # Ctrl-C, say
            self.abandon()
            raise
        if self.config.timeline:
            self.start_timeline(self.config.timeline, mark_cycles=self.config.timeline_mark_cycles)

    def _await_start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self._status.over.set()
            self._status.ended.set()
            text = f"the daemon's thread cannot be started ({error}): raise the limit on processes (ulimit -u)"
            raise StartError(text) from error
        if not self._status.started.wait(self.config.start_seconds):
            text = f"the ranks did not find each other within {self.config.start_seconds:g} s (start_seconds)"
            if absent := self._status.absent():
                text += f": on this host nothing is seen of rank{'s' * (len(absent) > 1)} {spans(absent)}"
            self.end(_GIVE_UP_SECONDS)  # it may be inside MPI, which nothing can interrupt
            raise StartError(text)
        if self._status.start_error is not None:
            self.end(_END_SECONDS)  # or the interpreter would end MPI while the thread still uses it
            raise self._status.start_error

    @property
    def met(self) -> bool:
        """Whether all ranks have met, on this rank and on the others."""
        return self._status.started.is_set() and self._status.start_error is None

    def abandon(self) -> None:
        """Makes the thread end as soon as it can, without the other ranks: the script has given up the start."""
        self._status.abandoned = self._status.stopping = True
        self._bell.ring()

    def join(self, seconds: float) -> bool:
        """Waits up to ``seconds`` for the thread to end; returns whether it has ended, or never began."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def allocate(self, size: int) -> np.ndarray:
        """Returns new zeroed memory for reductions, if possible shared by the ranks of this host.

        If no more can be shared, it is private to this process; its reductions only take longer. In a forked child it
        is private, too: the neighbours' list of blocks is its parent's.
        """
        if self._commons is not None and os.getpid() == self._pid:
            try:
                return self._commons.heap.allocate(size)
            except OSError as error:
                self._commons.heap.tell(error)
        return np.zeros(size, np.uint8)

    def blank(self, size: int) -> np.ndarray:
        """Returns uninitialised memory to be filled and sent once; to a rank of this host without a copy."""
        return self._notes.loans.blank(size) if os.getpid() == self._pid else blank(size)

    def set_window(self, seconds: float) -> None:
        """Sets the batching window, in seconds."""
        self._inbox.window = seconds

    def submit(self, entry: Entry, *, lazy: bool = False) -> None:
        """Submits a tensor; its handle completes or fails later, on every path.

        Args:
            entry: the tensor.
            lazy: whether the submitting thread waits for it next, which wakes the daemon, too.

        Raises:
            DuplicateNameError: an operation of this name is in flight; it is not disturbed.
            PeerError: another rank has failed.
            NotInitializedError: this daemon was stopped.
            ForkedProcessError: this is a forked child.
        """
        self._check_usable()
        if self._status.left_off:
            self.check_in_step(series_of(entry.request.name))
        if self.config.check_in_flight:
            seal(entry, rank=self.world.rank)
        try:
            if self._status.parts is not None:
                self._status.parts.member.table.reserve(entry)
            self._inbox.put(entry, entry.array.nbytes, wake=not lazy)
            if self._status.ended.is_set():  # it has ended since the check above
                self._loop.turn_away()
        except BaseException as error:
            self.broken_off(error, f"the submission of {entry.request.name!r}", series=series_of(entry.request.name))
            raise

    def submit_all(self, entries: Sequence[Entry]) -> None:
        """Submits several tensors: all of them or, if the name of one is in flight, none. Raises like `submit`."""
        self._check_usable()
        for entry in entries if self._status.left_off else ():
            self.check_in_step(series_of(entry.request.name))
        for entry in entries if self.config.check_in_flight else ():
            seal(entry, rank=self.world.rank)
        try:
            if self._status.parts is not None:
                self._status.parts.member.table.reserve_all(entries)
            for entry in entries:
                self._inbox.put(entry, entry.array.nbytes)
            if self._status.ended.is_set():
                self._loop.turn_away()
        except BaseException as error:
            for entry in entries:
                self.broken_off(error, "the submission of a group", series=series_of(entry.request.name))
            raise

    def post(self, letter: Letter, *, lazy: bool = False) -> None:
        """Starts a matched send or receive; raises like `submit`.

        Args:
            letter: the send or receive.
            lazy: whether it may start when something else wakes the thread, or a thread waits: messages from neighbours
                wake it, other messages are always polled for.
        """
        self._check_usable()
        if self._status.left_off:
            self.check_in_step((letter.name, letter.peer))
        try:
            self._do(letter, wake=not lazy or letter.peer not in self._notes)
            if self._status.ended.is_set():
                self._loop.turn_away()
        except BaseException as error:
            self.broken_off(error, f"the {letter.word} of {letter.name!r}", series=(letter.name, letter.peer))
            raise

    def take_back(self, handle: Handle[Any], error: BaseException) -> None:
        """Withdraws a receive that an exception has interrupted, so that the next one of its name gets the message.

        Args:
            handle: of the receive.
            error: the exception. If the message has begun to arrive, it is lost to the script, so the job fails.
        """
        own = handle.poll() and handle.error() is error  # such as the error of converting the result
        if not (own or raised_by_coordd(error)):
            text = f"was interrupted by {brief(error)} as {handle.name!r} arrived, which is lost: so the job ends"
            self._do(lambda: self._loop.take_back(handle, text))

    def say(self, message: Message) -> None:
        """Sends a message of another thread to the coordinator, or through it to another rank."""
        self._do(lambda: self._loop.recorder.tell(message))

    def refuse(self, refused: Refused) -> None:
        """Reports a rejection of this rank to the other ranks, after everything that it submitted before."""
        self._do(refused)

    def in_flight(self, name: str) -> bool:
        """Returns whether this rank has an operation of this name in flight."""
        return self._status.parts is not None and self._status.parts.member.table.reserved(name)

    def last_deadlock(self, members: tuple[int, ...]) -> int:
        """Returns the last plan that failed operations of a process set because of a deadlock; -1 if there was none.

        Only plans count that the script was notified of, since all members last joined.
        """
        return self._status.parts.member.deadlocks.last(members) if self._status.parts is not None else -1

    def hurry(self, name: str, *, heralded: bool = False) -> Callable[[], None] | None:
        """Ends the batching window, because a thread waits for an operation.

        Args:
            name: of the operation.
            heralded: whether the awaited message wakes the thread by itself, so that only queued work needs a wake-up.

        Returns:
            a function to call when the wait is over; None while no timeline is recorded.

        Raises:
            ForkedProcessError: this is a forked child, where no operation would ever complete.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError
        tape = self._loop.recorder.deck.tape
        over = tape.pause(name) if tape is not None else None
        if not heralded or self._inbox:
            self._inbox.hurry()
        return over

    def note_broken_wait(self) -> None:
        """Notifies the thread that an exception has ended a wait; does nothing in a forked child, which has none."""
        if os.getpid() == self._pid:
            self._do(self._loop.note_broken_wait)

    def start_timeline(self, folder: str, *, mark_cycles: bool = False) -> None:
        """Starts recording a timeline; the other ranks start when they receive the message.

        Args:
            folder: gets one file per rank.
            mark_cycles: whether to record the daemon's cycles, too.

        Raises:
            PeerError, NotInitializedError, ForkedProcessError: like `submit`.
        """
        self._record(folder, cycles=mark_cycles)

    def stop_timeline(self) -> None:
        """Ends the recording on all ranks; this rank's file is complete on return. Raises like `submit`."""
        self._record("", cycles=False)
        self._loop.recorder.finish()

    def _record(self, folder: str, *, cycles: bool) -> None:
        self._check_usable()
        recorder, place = self._loop.recorder, folder and str(Path(folder).absolute())

        def record() -> None:
            if (recording := recorder.call(place, cycles=cycles)) is not None:
                recorder.tell(recording)

        self._run_on_thread(record)

    def lose_no_time(self) -> None:
        """Ends the batching window although no thread waits."""
        self._inbox.hurry(waiting=False)

    def handle(self, name: str, *, peer: int | None = None) -> Handle[Any]:
        """Returns a handle whose waiters end the batching window; for a message if there is a ``peer``."""
        heralded = peer is not None and peer in self._notes
        return Handle(name, partial(self.hurry, heralded=True) if heralded else self.hurry, self._on_broken_wait)

    def fail(self, reason: str, traceback: str = "", *, culprit: int | None = None) -> None:
        """Reports to all ranks that the job has failed, unless it has already; by default this rank is the culprit."""
        if os.getpid() == self._pid and self._thread.is_alive() and not self._status.failing:
            failure = Failure(self.world.rank if culprit is None else culprit, reason, traceback)
            self._status.failing = True
            self._do(lambda: self._loop.report_failure(failure))

    def broken_off(self, error: BaseException, what: str, *, series: Series, all_submitted: bool = False) -> bool:
        """Fails the job if an exception that coordd has not raised has interrupted its work; returns whether one has.

        Only a signal handler or a lack of memory raises one there. It is then unknown how much of the work is done, and
        this rank would be out of step with the others without an error. After ``sys.exit(0)``, of a handler of SIGTERM,
        say, this rank ends; the job fails only if the script continues with what is out of step.

        Args:
            error: the exception; an error that coordd raises is a rejection, and leaves nothing half done.
            what: the work.
            series: what is out of step then; see `check_in_step`.
            all_submitted: whether only the wait for the work was interrupted, so that this rank can still join.
        """
        if exits(error):
            self._status.left_off[series] = what
            self._status.half_done |= not all_submitted
        elif not raised_by_coordd(error):
            text = f"was interrupted by {brief(error)} during {what}: ranks are out of step then, so the job ends"
            self.fail(text)
        else:
            return False
        return True

    @property
    def half_done(self) -> bool:
        """Whether ``sys.exit(0)`` has interrupted coordd's work before all of it was submitted."""
        return self._status.half_done

    def has_left_off(self, series: Series) -> bool:
        """Returns whether ``sys.exit(0)`` has interrupted this; see `broken_off`."""
        return series in self._status.left_off

    def check_in_step(self, series: Series) -> None:
        """Fails the job if the script continues with what ``sys.exit(0)`` has interrupted.

        Args:
            series: what is to be continued; see `broken_off`.

        Raises:
            PeerError: it continues.
        """
        what = self._status.left_off.get(series)
        if what is not None and threading.current_thread() is not self._thread:
            self.fail(f"has continued after sys.exit(0) interrupted {what}: ranks are out of step then")
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raises the failure of the job that this rank has reported, once the daemon's thread has it.

        Raises:
            PeerError: the failure.
        """
        self._run_on_thread(lambda: None)
        self._check_usable()

    def unbroken(self, what: str, *, series: Series) -> AbstractContextManager[None]:
        """Fails the job if an exception that coordd has not raised interrupts the work inside; see `broken_off`."""
        return _Unbroken(self, what, series)

    def note_told(self, handle: Handle[Any]) -> None:
        """Adds an operation that informs other ranks and should complete before this rank leaves."""
        self._told = [*(each for each in self._told if not each.poll()), handle]

    def await_told(self, seconds: float) -> None:
        """Waits up to ``seconds`` for those operations: the other ranks may never take part in them."""
        end = time.monotonic() + seconds
        for handle in self._told if os.getpid() == self._pid else ():
            handle.wait(max(0.0, end - time.monotonic()))

    def stop(self) -> bool:
        """Leaves in step with the other ranks: blocks until all have left, or the job has failed.

        Returns:
            whether the job has not failed.

        Raises:
            DeadlockError: the calling thread is the daemon's own thread.
        """
        check_may_wait("shutdown()")
        if os.getpid() == self._pid and self._thread.is_alive():
            self._status.leaving = True
            self._do(self._loop.say_goodbye)  # each time: an earlier call may have been interrupted just before
            self._status.over.wait()
        return not self._status.failing

    def end(self, seconds: float) -> bool:
        """Ends the thread without waiting for other ranks; returns whether it ended within ``seconds``."""
        self._status.stopping = True
        self._bell.ring()
        return self._status.ended.wait(seconds)

    def blame(self, seconds: float) -> Failure:
        """Waits up to ``seconds`` until this rank knows the first failure of the job, and returns it."""
        self._status.over.wait(seconds)
        return self._status.failure or Failure(self.world.rank, "failed")

    def wait_for_loss(self, rank: int, seconds: float) -> None:
        """Waits up to ``seconds`` until a rank's process is gone.

        On another host only the end of a connection shows that, and only neighbours in the tree have one.
        """
        if self.world.hosts[rank] == self.world.host:
            if not is_stopped(self._status.pids[rank]):  # otherwise it does not end by itself
                await_end(self._status.pids[rank], seconds)
            return
        gone = threading.Event()
        self._do(lambda: self._loop.watch_for(rank, gone))
        gone.wait(seconds)

    @property
    def _commons(self) -> Commons | None:
        return self._status.parts.commons if self._status.parts is not None else None

    @property
    def _notes(self) -> Notes:
        return self._status.parts.mailbox.notes if self._status.parts is not None else Notes()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError
        if self._status.failure is not None:
            raise peer_error(self._status.failure)
        if self._status.leaving:
            raise NotInitializedError

    def _run_on_thread(self, work: Callable[[], None]) -> None:
        """Runs work on the daemon's thread and waits for it, or for the thread's end."""
        if threading.current_thread() is self._thread:
            work()
            return
        gate = threading.Lock()  # an Event has a lock of its own, which a signal handler's thread may hold
        gate.acquire()

        def run() -> None:
            try:
                work()
            finally:
                gate.release()

        self._do(run)
        while not gate.acquire(timeout=_LOOK_SECONDS) and not self._status.ended.is_set():
            pass

    def _do(self, work: Work, *, wake: bool = True) -> None:
        """Queues work that does not wait for the batching window."""
        self._inbox.slip(work, wake=wake)
