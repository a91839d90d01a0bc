"""The event loop of the daemon's thread; no other thread calls anything here but `turn_away`.

It never blocks on one operation while another could progress, and sleeps without using the CPU when nothing can happen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordd.collectives.dispatch import Plane
from coordd.collectives.scheduler import Flights
from coordd.config import Config
from coordd.daemon.blocked_script import BlockWatch
from coordd.daemon.message_queue import Inbox
from coordd.daemon.peer_exits import Departures
from coordd.daemon.peer_to_peer import Letter, Mailbox
from coordd.daemon.peer_watch import MailWatch, fail
from coordd.daemon.polling import Patience, nap_precisely
from coordd.daemon.rendezvous import Link, Rendezvous
from coordd.daemon.shared_state import Parts, Status, peer_error
from coordd.daemon.stall_inspector import Delay, Lookout
from coordd.daemon.timeline_recorder import Recorder
from coordd.daemon.wakeup import Bell
from coordd.errors import ShutdownError, StartError, brief
from coordd.host.affinity import keep_to
from coordd.host.oversubscription import Crowd, oversubscribed
from coordd.host.world import World
from coordd.monitoring.stacks import Account, account, is_stopped
from coordd.negotiation.aggregator import hub
from coordd.negotiation.bucket import Locked
from coordd.negotiation.channel import Lost
from coordd.negotiation.coordinator import Coordinator
from coordd.negotiation.deadlock import Heard
from coordd.negotiation.tensor_table import Entry
from coordd.negotiation.tree import post, superiors
from coordd.negotiation.worker import Due, Member
from coordd.ops.handles import Handle, forbid_waiting
from coordd.ops.messages import (
    Abort,
    Failure,
    Goodbye,
    Hello,
    Inquiry,
    Message,
    Plan,
    Recording,
    Refused,
    StallReport,
    Welcome,
)
from coordd.version import VERSION

__all__ = ["Loop", "Work"]

log = logging.getLogger("coordd")

Work = Entry | Letter | Refused | Heard | Callable[[], None]

_SHORTEST_SLEEP = 1e-3
_LOOKS = 16
_HELD_SECONDS = 0.25  # far longer than a backward pass takes from one gradient of a bucket to the next
_HELD_LOOK_SECONDS = 0.1
_FAREWELL_SECONDS = 1.0
_CAUSE_SECONDS = 1.0
_AGREED_SECONDS = 30.0  # all ranks have promised it; only a rank that dies after its goodbye breaks that


class Loop:
    """One rank's communication: owns the link, the tensor table and all operations in flight."""

    def __init__(self, config: Config, meet: Rendezvous, *, inbox: Inbox[Work], bell: Bell, status: Status) -> None:
        """Prepares the loop.

        Args:
            config: the settings.
            meet: how this rank finds the others.
            inbox: where framework threads queue work.
            bell: wakes this thread.
            status: the daemon's state that framework threads may read.
        """
        self._config = config
        self._meet = meet
        self._inbox = inbox
        self._bell = bell
        self._status = status
        self._link: Link | None = None
        self._departures = Departures()
        self._parting: float | None = None
        self._connected = self._said_goodbye = self._landed = False
        self._lock_number, self._locked_at = 0, 0.0
        self._held_look = 0.0
        self._patience = Patience()
        self._wreck: list[object] = []
        self._dues: list[Due] = []
        self.recorder = Recorder()

    def run(self) -> None:
        """Runs until all ranks have left, the job has failed and no wait is open, or a stop is requested."""
        try:
            forbid_waiting()
            self._connect(self._prepare())
            while not self._status.stopping:
                self._cycle()
        except BaseException as error:  # noqa: BLE001 - whatever it is, somebody waits who must hear of it
            self._crash(error)
        finally:
            self._finish()

    def report_failure(self, failure: Failure) -> None:
        """Reports to all ranks that the job has failed."""
        if self._status.failure is None:
            self._tell(Abort(failure))
            self._break(failure)

    def refuse(self, refused: Refused) -> None:
        """Reports a refusal of this rank, and breaks the lock, so that the refusal is negotiated."""
        if self._status.failure is None:
            self._carry_out(self._member.refuse(refused))
            if (told := self._member.told(refused)) is not None:
                self._tell(told)

    def note_broken_wait(self) -> None:
        """Records that an exception ended a wait, so the script continues although the operation is in flight."""
        self._blocks.note_news(time.monotonic())

    def take_back(self, handle: Handle[Any], reason: str) -> None:
        """Cancels a receive; if its message has begun to arrive, the job fails with this reason."""
        if self._status.failure is None and not self._mailbox.take_back(handle):
            self.report_failure(Failure(self._status.world.rank, reason))

    def say_goodbye(self) -> None:
        """Leaves: operations that other ranks have not announced by now fail on all ranks."""
        if self._status.failure is None and not self._said_goodbye:
            self._said_goodbye = True
            self._carry_out(self._member.leave())
            self._letters.leaving = True
            self._tell(Goodbye(traffic=self._mailbox.traffic))

    def landed(self, entries: Sequence[Entry]) -> None:
        """Records that results have arrived."""
        for entry in entries:
            self._member.table.release(entry)
        self._landed = True
        self._patience.note_landed()
        self._status.count(entries, time.monotonic())
        self._lookout.observe(entries[0], time.monotonic())

    def settled(self, word: Locked, *, moved: bool) -> None:
        """Records the outcome of an iteration of a locked bucket."""
        if moved and word.bucket is not None:
            self._status.traffic.locked += len(word.bucket.entries)
        self._dues.append(self._member.landed(word) if moved else self._member.refused(word))

    def watch_for(self, rank: int, gone: threading.Event) -> None:
        """Sets ``gone`` once the neighbour on the way to a rank is gone, which outlives that rank's process."""
        self._departures.watch(self._own_post.toward(rank), gone)

    def _cycle(self) -> None:
        if self._dues:  # from locked buckets that completed while this thread fell asleep
            self._carry_out_dues()
        moved = self._announce() and self._member.lock is not None and self._advance()  # other ranks wait for it
        self._watch(time.monotonic())
        self._listen()
        if self._member.stopped:
            self._part()
        moved |= self._advance() | self._deliver()
        self.recorder.look()
        self._rest(moved=moved)

    def _advance(self) -> bool:
        """Drives the operations in flight, and carries out the actions that their completion requires."""
        moved = self._flights.advance()
        if self._dues:
            self._carry_out_dues()
        return moved

    def _carry_out_dues(self) -> None:  # from locked buckets that have ended
        while self._dues:
            self._carry_out(self._dues.pop(0))

    def _watch(self, now: float) -> None:
        """Runs the watchers that are due; called in every cycle, so it must be cheap."""
        if now >= self._held_look:
            self._release_held(now)
        if now >= self._lookout.due:
            self._lookout.look(now)
        if self._blocks.due is not None and now >= self._blocks.due:
            self._blocks.look(now)
        self._letters.look(self._blocks, now)

    def _prepare(self) -> Exception | None:
        """Prepares this thread; returns the error, which the other ranks will receive, or None."""
        try:
            keep_to(self._config.daemon_cores)
            nap_precisely()
            np.seterr(all="ignore")  # for this thread: overflow gives infinity, as in other frameworks
        except Exception as error:  # noqa: BLE001 - raised when there is a way to the others
            return error
        return None

    def _connect(self, error: Exception | None) -> None:
        """Finds the other ranks; raises the error of any rank on all ranks.

        Args:
            error: of this rank's preparation; None if it succeeded.
        """
        link = self._meet(self._bell)
        start = link.start
        try:
            with start.shared():
                self._assemble(link, error)
            start.gather(None)
        except BaseException:
            link.close(failed=not start.in_step)
            raise
        self._link = link
        self._connected = True
        self._tell(Hello(VERSION, self._config.digest, os.getpid(), link.hosts[link.transport.rank]))

    def _assemble(self, link: Link, error: Exception | None) -> None:
        """Creates the parts of this rank, unless there is an error already; sends nothing yet."""
        if error is not None:
            raise error
        if self._status.stopping:
            raise StartError.given_up(self._config.start_seconds)
        transport = link.transport
        self._control = link.control
        self._bell.watch(self._control.descriptors)
        self._status.world = World(transport.rank, link.hosts, machines=link.machines)
        self._member = Member(transport.rank, cache_capacity=self._config.cache_capacity)
        self._member.deadlocks.later = self._inbox.put
        plane = Plane(
            transport.collective,
            link.commons,
            rank=transport.rank,
            hosts=link.hosts,
            chunk=self._config.chunk_kb << 10,
            deck=self.recorder.deck,
        )
        self._flights = Flights(plane, self)
        self._beats = 0
        self._mailbox = Mailbox(transport.matched, transport.rank, self.recorder.deck, notes=link.notes)
        far = any(peer not in self._mailbox.notes for peer in range(transport.size) if peer != transport.rank)
        self._letters = MailWatch(self._mailbox, self._member, self._tell, far=far)
        self._lookout = Lookout(
            self._config, self._member.table, self._elsewhere, ask=self._complain, give_up=self.report_failure
        )
        self._blocks = BlockWatch(
            self._member.table,
            thread=lambda: self._status.script,
            busy=self._is_moving,
            submitted=lambda: bool(self._inbox),
            tell=self._letters.tell_blocked,
            mail=self._mailbox,
        )
        self._status.parts = Parts(self._member, self._flights, self._mailbox, link.commons, self._inbox)
        self._own_post = post(transport.rank, link.hosts, self._config.fan_in)
        self._hub = hub(self._own_post, self._coordinate, stopped=self._is_stopped)
        self.recorder.connect(self._tell, self._control.send, parent=self._own_post.parent)

    def _coordinate(self, voices: Sequence[int] | None) -> Coordinator:
        return Coordinator(
            self._status.world.size,
            cache_capacity=self._config.cache_capacity,
            fusion_bytes=int(self._config.fusion_mb * (1 << 20)),
            abort_seconds=self._config.stall_abort_seconds,
            lock_steps=self._config.lock_steps,
            voices=voices,
            stopped=self._is_stopped,
        )

    def _is_stopped(self, rank: int) -> bool:
        """Returns whether the process of a rank is known to be stopped; False for ranks on other hosts."""
        status = self._status
        return bool(status.pids) and status.world.hosts[rank] == status.world.host and is_stopped(status.pids[rank])

    def _is_moving(self) -> bool:
        """Returns whether data is in flight, or has moved since the last call.

        A locked bucket that waits for other ranks' votes does not count: they may never come, if those ranks wait for
        operations that this one does not submit. Nor does a send, or a receive for which nothing has arrived.
        """
        before = self._beats
        negotiated, self._beats = self._flights.progress
        return negotiated or self._beats != before or self._mailbox.receiving

    def _deliver(self) -> bool:
        """Drives sends and receives; an arrival ends a wait, or changes this rank's report about it."""
        moved = self._mailbox.advance()
        if self._said_goodbye:
            self._mailbox.drop_unwanted()
        if moved:
            self._blocks.note_mail(time.monotonic())
        return moved

    def _elsewhere(self) -> list[Delay]:
        """Lists operations that wait for other ranks without the coordinator knowing, and since when."""
        return [*self._mailbox.waiting(), *self._flights.waiting()]

    def _release_held(self, now: float) -> None:
        """Breaks the lock if a bucket is partly filled, and has got no further tensor for a while.

        The rest may come only after the result of the held tensors, although no thread of this rank waits: its program
        polls, or continues in a done callback. This does not depend on the stall check.
        """
        lock = self._member.lock
        if lock is None:
            return
        self._held_look = now + _HELD_LOOK_SECONDS
        if lock.number != self._lock_number:
            self._lock_number, self._locked_at = lock.number, now
        since = lock.held_since
        if since is not None and now - max(since, self._locked_at) > _HELD_SECONDS:
            self._carry_out(self._member.unlock())

    def _complain(self, overdue: Callable[[], Message]) -> None:
        """Queries the coordinator about overdue operations; breaks the lock, so that it knows of them."""
        self._carry_out(self._member.unlock())
        self._tell(overdue())

    def _carry_out(self, due: Due) -> None:
        """Starts buckets, gives votes, and reports."""
        if (due.words or due.messages) and self._blocks.told:
            self._blocks.note_news(time.monotonic())
        for bucket in due.buckets:
            self._flights.start(bucket)
        for word in due.words:
            self._flights.give(word)
        for message in due.messages:
            self._tell(message)

    def _announce(self) -> bool:
        """Takes the queued work and announces new tensors; returns whether there was any work."""
        items = self._inbox.take()
        if items:
            self._patience.note_submitted()
            self._lookout.note(items)
            self._take_in(items)
        if self._inbox.waited and self._status.failure is None:
            self._carry_out(self._member.awaited())
            self._blocks.note_wait(time.monotonic())
        for item in items:
            if isinstance(item, Letter):
                self._post(item)
            elif not isinstance(item, Entry | Refused | Heard):
                item()
        return bool(items)

    def _take_in(self, items: list[Work]) -> None:
        """Announces tensors and refusals in the order in which they were queued: a refusal may precede a second try."""
        entries = [item for item in items if isinstance(item, Entry)]
        if len(entries) < len(items):
            for between in [item for item in items if isinstance(item, Refused | Heard)]:
                place = items.index(between)
                self._admit([item for item in items[:place] if isinstance(item, Entry)])
                if isinstance(between, Refused):
                    self.refuse(between)
                elif self._status.failure is None:
                    self._carry_out(self._member.settle(between))
                items = items[place + 1 :]
            entries = [item for item in items if isinstance(item, Entry)]
        self._admit(entries)

    def _admit(self, entries: list[Entry]) -> None:
        if self._status.failure is None:
            self._carry_out(self._member.announce(entries))
            return
        for entry in entries:
            entry.handle.fail(peer_error(self._status.failure))

    def _post(self, letter: Letter) -> None:
        if self._status.failure is not None:
            letter.handle.fail(peer_error(self._status.failure))
        else:
            if self._blocks.told:
                self._blocks.note_news(time.monotonic())
            self._mailbox.start(letter)
            self._blocks.note_wait(time.monotonic())

    def _tell(self, message: Message) -> None:
        """Sends to the coordinator, or to the rank between."""
        if self._hub is not None:
            self._hub.hear(self._own_post.rank, message, now=time.monotonic())
        else:
            self._control.send(self._own_post.parent, message)

    def _listen(self) -> None:
        """Receives control messages; where ranks report to this one, its hub processes them and replies."""
        arrived = self._control.receive()
        arrived = arrived and self.recorder.sift(arrived)
        if self._hub is None:
            for sender, message in arrived:
                self._obey(sender, message)
            return
        now, own = time.monotonic(), self._own_post.rank
        for sender, message in arrived:
            if isinstance(message, Lost):
                self._departures.note(sender)
            self._hub.hear(sender, message, now=now)
        while said := self._hub.turn(now):  # this rank may answer its own messages at once
            for rank, message in sorted(said, key=lambda told: told[0] == own):  # other ranks first
                if rank == own:
                    self._obey(rank, message)
                else:
                    self._control.send(rank, message)

    def _obey(self, sender: int, message: Message | Lost) -> None:
        self._patience.restart()
        match message:
            case Plan():
                self._follow(message)
            case Abort():
                self._break(message.failure)
            case Inquiry() | Account():
                self._answer(message)
            case StallReport():
                self._lookout.answer(message)
            case Welcome():
                self._enter(message)
            case Recording():
                self.recorder.hear(message)
            case Lost() if not self._member.stopped:
                self._departures.note(sender)
                self._break(Failure.death(sender, self._status.place(sender), stopped=self._is_stopped(sender)))

    def _answer(self, message: Inquiry | Account) -> None:
        if message.number:
            self._status.desk(message)
        else:
            self._tell(account(self._status.world.rank, self._member.table.last, self._lookout.idle()))

    def _follow(self, plan: Plan) -> None:
        if self._status.failure is not None:
            return
        if plan.lock:
            self._blocks.note_lock(time.monotonic())
        self._carry_out(self._member.follow(plan))
        self._letters.follow(plan, self._blocks, time.monotonic())

    def _enter(self, welcome: Welcome) -> None:
        self._status.world = dataclasses.replace(self._status.world, hosts=welcome.hosts)
        self._status.pids = welcome.pids
        self.recorder.enter(self._status.world, welcome.pids)
        neighbours = [welcome.pids[rank] for rank in self._status.world.neighbours]
        self._patience.crowded = oversubscribed(*Crowd.of(neighbours, os.environ))
        self._lookout.coordinator = (welcome.pids[0], welcome.hosts[0], self._status.world.host)
        above = superiors(self._own_post.rank, welcome.hosts, self._config.fan_in)
        here = self._status.world.host
        self._lookout.superiors = {rank: welcome.pids[rank] if welcome.hosts[rank] == here else 0 for rank in above}
        if welcome.refusal:
            self._status.start_error = StartError(welcome.refusal)
            self._status.stopping = True
        self._status.started.set()

    def _break(self, failure: Failure) -> None:
        """Fails everything in flight with the cause; the thread keeps running until the other ranks are gone."""
        if self._status.failure is not None:
            return
        self._status.failure = failure
        if not self._status.started.is_set():
            self._status.start_error = peer_error(failure)
            self._status.started.set()
        self._status.failing = True
        self._status.over.set()
        self._fail_all(lambda _: peer_error(failure))

    def _fail_all(self, error: Callable[[str], BaseException]) -> None:
        entries = dict.fromkeys([*self._flights.clear(), *self._member.table.clear()])
        letters = self._mailbox.clear()
        # MPI may still write into the buffers of operations in flight, so they are kept until the process ends.
        self._wreck += [*entries, *letters]
        for entry in entries:
            fail(entry.handle, error(entry.request.name))
        for letter in letters:
            fail(letter.handle, error(letter.name))

    def _part(self) -> None:
        """Ends the thread once all ranks have left and operations in flight have completed, or never will."""
        now = time.monotonic()
        self._parting = now if self._parting is None else self._parting
        self._mailbox.peek()
        self._mailbox.drop_all()
        if not self._flights and self._mailbox.is_through(now - self._parting):
            self._status.stopping = True
        elif now >= self._farewell:
            log.warning("left with operations that another rank has not taken part in")
            self._status.stopping = True

    @property
    def _farewell(self) -> float:
        """When the thread ends although operations are in flight; infinity before all ranks have left."""
        if self._parting is None:
            return math.inf
        return self._parting + (_AGREED_SECONDS if self._flights else _FAREWELL_SECONDS)

    def _crash(self, error: BaseException) -> None:
        """Turns an error of the daemon itself into a failure of the job on all ranks, so no wait is left open."""
        starting = not self._status.started.is_set()
        if starting:
            self._status.start_error = error
            self._status.started.set()
        if self._link is None:  # `_connect` has reported the error to the other ranks
            return
        if not starting:
            self._await_cause()
            if self._status.failure is not None:
                log.debug("the daemon of rank %d failed, too", self._status.world.rank, exc_info=error)
                return
            log.critical("the daemon of rank %d failed", self._status.world.rank, exc_info=error)
        deed = "could not start" if starting else "failed in its daemon"
        failure = Failure(self._status.world.rank, f"{deed}: {brief(error)}")
        try:
            self._break(failure)
            self._tell(Abort(failure))
            self._listen()
        except BaseException:
            log.exception("the other ranks could not be told")

    def _await_cause(self) -> None:
        """Listens for a second: the error may come from the death of a neighbour, which the other ranks will report.

        The memory of a process that is gone cannot be mapped, for example.
        """
        until = time.monotonic() + _CAUSE_SECONDS
        while self._status.failure is None and time.monotonic() < until:
            with contextlib.suppress(Exception):
                self._listen()
            time.sleep(_CAUSE_SECONDS / 100)

    def _finish(self) -> None:
        """Closes the link; no thread waits any more, even if a step fails."""
        self._status.leaving = True
        try:
            with contextlib.ExitStack() as steps:  # the last one runs first; an error skips none
                steps.callback(self._bell.close)
                steps.callback(self._departures.end)
                steps.callback(self._leave_link)
                steps.callback(self.recorder.close)
        except BaseException:
            log.exception("the daemon of rank %d did not end in order", self._status.world.rank)
        self._status.over.set()
        self._status.ended.set()
        self.turn_away()

    def _leave_link(self) -> None:
        """Fails the operations in flight, and closes the link; a `_connect` that failed has closed it itself."""
        unmatched = self._connected and self._mailbox.in_transit
        disorderly = self._status.failure is not None or self._status.abandoned or unmatched
        with contextlib.ExitStack() as steps:  # as above
            if self._link is not None:
                steps.callback(self._link.close, failed=disorderly)
            steps.callback(self.turn_away)
            if self._connected:
                steps.callback(self._fail_all, ShutdownError)

    def turn_away(self) -> None:
        """Fails the operations left in the inbox; no thread will take them out."""
        for item in self._inbox.drain():
            if isinstance(item, Entry | Letter):
                fail(item.handle, ShutdownError(item.handle.name))

    def _rest(self, *, moved: bool) -> None:
        """Sleeps as long as nothing can happen."""
        if self._status.stopping:
            return
        if moved:
            self._patience.restart()
        elif self._awaited and self._patience.short(data=bool(self._flights) and not self._flights.heralded):
            self._stay_awake()
        else:
            self._sleep()

    @property
    def _awaited(self) -> bool:
        """Whether a thread waits for a tensor; for messages alone this thread can sleep."""
        return self._inbox.awaited and bool(self._flights or self._member.table)

    def _sleep(self) -> None:
        """Sleeps, if a last look finds nothing; naps where no wake-up announces the data."""
        if self._flights.nod_off():
            self._patience.restart()
        elif not (self._control.ready() or self._mailbox.news):
            if self._mailbox.unheralded or (self._flights and not self._flights.heralded):
                self._patience.doze(self._bell, awaited=self._inbox.awaited)
            else:
                self._let_script_run()
                self._inbox.sleep(self._deadline())
        self._flights.wake_up()
        self._landed = False

    def _let_script_run(self) -> None:
        """Yields the core to a script that has just got the result that it waited for, and has nothing else in flight.

        It may submit its next operation before this thread sleeps, which saves a wake-up: where both share a core, it
        gets to run only now. While anything else is in flight, a script that computes would keep the core for too long.
        """
        if self._landed and self._patience.prompt and not (self._flights or self._member.table or self._mailbox):
            os.sched_yield()

    def _stay_awake(self) -> None:
        """Checks the data several times before the next look at everything else."""
        for _ in range(_LOOKS):
            self._patience.spin()
            if self._advance():
                self._patience.restart()
            if self._inbox or not self._flights:
                return

    def _deadline(self) -> float | None:
        """Seconds until a deadline gives the daemon something to do; None for never."""
        now = time.monotonic()
        deadlines = (self._hub.deadline if self._hub is not None else None, self.recorder.deadline)
        times = [deadline - now for deadline in deadlines if deadline is not None]
        if self._parting is not None:
            times.append(self._farewell - now)
        if (lock := self._member.lock) is not None and lock.partial:
            times.append(self._held_look - now)
        watches = [self._blocks.remaining(now), self._letters.remaining(now)]
        if self._flights or self._member.table or self._mailbox:
            watches.append(self._lookout.remaining(now))
        times += [remaining for remaining in watches if remaining is not None]
        return max(_SHORTEST_SLEEP, min(times)) if times else None
