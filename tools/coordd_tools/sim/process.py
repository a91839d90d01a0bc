"""One simulated rank: the real `Member`, and the work of its daemon and main thread in virtual time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from coordd.daemon.blocked_script import Awaited, BlockWatch
from coordd.daemon.peer_watch import describe, same
from coordd.errors import PeerError, ShutdownError
from coordd.negotiation.aggregator import Hub
from coordd.negotiation.channel import Lost
from coordd.negotiation.deadlock import Heard
from coordd.negotiation.stall import StallWatch, tell
from coordd.negotiation.tensor_table import Entry
from coordd.negotiation.tree import NOBODY
from coordd.negotiation.worker import Bucket, Due, Locked, Member
from coordd.ops.messages import (
    Abort,
    Account,
    Blocked,
    Expecting,
    Failure,
    Goodbye,
    Hello,
    Inquiry,
    Message,
    Overdue,
    Plan,
    Refused,
    Report,
    StallReport,
    Waiting,
    Welcome,
)
from coordd_tools.sim.caches import told
from coordd_tools.sim.ledger import LOCKED, Submission
from coordd_tools.sim.letters import Letter, Mailbag, Receipt
from coordd_tools.sim.program import Made, Pause, program
from coordd_tools.sim.script import Round
from coordd_tools.sim.setting import Setting

__all__ = ["Process"]

_WINDOW = 3e-4
_FAREWELL = 30.0
_ACTIVE = 4


Work = Entry | Letter | Receipt | Refused | Heard | Callable[[], None]


class Process:
    """A daemon and its main thread; its steps are those of `coordd.daemon.daemon`, without threads and sockets."""

    def __init__(self, rank: int, setting: Setting, hub: Hub | None) -> None:
        """Creates a rank, which starts with `start`.

        Args:
            rank: its number.
            setting: the environment of the rank.
            hub: the coordinator on rank 0; a foreman on other ranks that have children.
        """
        self.rank = rank
        self.member = Member(
            rank, cache_capacity=setting.settings.cache_capacity, numbering=setting.payload.numbering()
        )
        self.failure: Failure | None = None
        self.crashed = False
        self.raised = False
        self.doomed = False
        self.closed = False
        self._setting = setting
        self._hub = hub
        self._post = setting.settings.posts[rank]
        self._neighbours = [peer for peer in (*self._post.children, self._post.parent) if peer != NOBODY]
        self._inbox: list[Work] = []
        self.member.deadlocks.later = self._hear
        self._mail: deque[tuple[int, Message | Lost]] = deque()
        self._landed: list[Bucket] = []
        self._active_at = 0.0
        self._queue: deque[Bucket] = deque()
        self._active: dict[int, Bucket] = {}
        self._open: list[Locked] = []
        self._outcomes: list[tuple[Locked, bool]] = []
        self._hurried = False
        self._stall = StallWatch(setting.settings.stall_seconds)
        self._program: Iterator[Pause] | None = None
        self._awaited: list[Made] | None = None
        self._due = float("inf")
        self._frozen_until = 0.0
        self._parting: float | None = None
        self._beside = 0
        self._noted: Made | None = None
        self.bag = Mailbag(rank, setting.routes, wake=lambda: self._wake(0.0))
        self._blocks = _Watch(self) if setting.swarm.blocks else None

    # Events of a rank.

    def start(self) -> None:
        """Sends a hello."""
        self.tell(Hello("1", "same", 1000 + self.rank, "host"))

    def arrive(self, sender: int, message: Message | Lost) -> None:
        """Receives a message."""
        self._mail.append((sender, message))
        self._wake(self._setting.rng.uniform(0, _WINDOW))

    def crash(self) -> None:
        """Crashes without sending anything."""
        if not self.closed and not self.member.stopped:
            self._note("crashes")
            self.crashed = self.closed = True
            self._setting.ledger.failed = True
            self._setting.exchange.crash(self.rank)
            self._setting.words.crash(self.rank)
            self._setting.payload.stop(self.rank)
            self._setting.network.close(self.rank, self._neighbours, crashed=True)

    def crash_when_leaving(self) -> None:
        """Crashes after the rank has said goodbye, while other ranks may still need it."""
        self.doomed = True

    def freeze(self, seconds: float) -> None:
        """Stops for some seconds, as after SIGSTOP, and then continues."""
        self._note(f"stands still for {seconds:.3f} s")
        self._frozen_until = self._setting.agenda.now + seconds

    def raise_error(self) -> None:
        """Raises an exception in the script."""
        if self.failure is None and not self.closed and not self.member.stopped:
            self._note("fails")
            self.raised = True
            self._setting.ledger.failed = True
            failure = Failure(self.rank, "raised ValueError")
            self._inbox.append(lambda: self._report_failure(failure))
            self._wake(0.0)

    # Requests of the program.

    def submit(self, turn: Round, *, duplicate: bool = False) -> Submission:
        """Submits this rank's part of a round; it fails at once if the job has failed."""
        made = self._setting.ledger.submit(self.rank, turn, duplicate=duplicate)
        made.submitted = self._setting.agenda.now
        if self.failure is not None:
            made.fail(_peer_error(self.failure))
            return made
        self._active_at = made.submitted
        self._inbox.append(made.entry)
        self._wake(self._setting.rng.uniform(0, _WINDOW))
        return made

    def busy(self, name: str) -> bool:
        """Returns whether a submission under this name would be a duplicate now."""
        waiting = [*self.member.table, *(item for item in self._inbox if isinstance(item, Entry))]
        return self.failure is None and any(entry.request.name == name for entry in waiting)

    @property
    def busy_beside(self) -> bool:
        """Whether another thread has yet to submit something."""
        return self._beside > 0 and not self.closed

    def submit_beside(self, turns: Sequence[tuple[float, Round]]) -> list[Made]:
        """Submits rounds on another thread, each after some seconds; returns the list that will contain them."""
        made: list[Made] = []
        self._beside += len(turns)

        def submit(turn: Round) -> None:
            if self.closed:
                return
            if (frozen := self._frozen_until - self._setting.agenda.now) > 0:
                self._setting.agenda.after(frozen, partial(submit, turn))
                return
            self._beside -= 1
            made.append(self.submit(turn))
            self._note_waits()

        for seconds, turn in turns:
            self._setting.agenda.after(seconds, partial(submit, turn))
        return made

    def exchange(self, letter: Letter) -> Receipt | None:
        """Sends or starts to receive a message; returns None for the send of a small one, which needs no wait."""
        outgoing = letter.sender == self.rank
        receipt = None
        if letter.large or not outgoing:
            receipt = Receipt(self._setting.ledger, letter, outgoing=outgoing)
            receipt.submitted = self._setting.agenda.now
        self._inbox.append(receipt or letter)
        self._wake(0.0)
        return receipt

    def _begin(self, what: Letter | Receipt) -> None:
        """Starts a send or a receive, as the daemon does."""
        if self._blocks is not None and self._blocks.told:
            self._blocks.note_news(self._setting.agenda.now)
        if isinstance(what, Letter):
            self.bag.send(what, None)
        elif self.failure is not None:
            what.fail(_peer_error(self.failure))
        elif what.turn.outgoing:
            self.bag.send(what.turn.letter, what)
        else:
            self.bag.receive(what)
        if self._blocks is not None:
            self._blocks.note_wait(self._setting.agenda.now)

    def refuse(self, refused: Refused) -> None:
        """Reports that this rank has left a collective call by an exception, or refuses its part of an operation."""
        self._inbox.append(refused)
        self._wake(0.0)

    def _hear(self, heard: Heard) -> None:
        self._inbox.append(heard)

    def say_goodbye(self) -> None:
        """Leaves the job."""
        self._inbox.append(self._leave)
        self._wake(0.0)

    # The daemon.

    def _wake(self, delay: float) -> None:
        """Schedules a cycle after some seconds."""
        agenda = self._setting.agenda
        due = max(agenda.now + delay, self._frozen_until)
        if due < self._due:
            self._due = due
            agenda.at(due, lambda: self._cycle(due))

    def _cycle(self, due: float) -> None:
        if self.closed or due != self._due:
            return
        self._due = float("inf")
        if due < self._frozen_until:
            self._wake(0.0)
            return
        self._announce()
        self._watch()
        if self._blocks is not None and self.failure is None:
            self._blocks.look(self._setting.agenda.now)
        self._listen()
        self._land()
        self._advance()
        if self.bag.deliver() and self._blocks is not None:
            self._blocks.note_mail(self._setting.agenda.now)
        self._setting.payload.advance(self.rank)
        if self.failure is None and (unknown := self.bag.old(self._setting.agenda.now)):
            self.tell(Expecting(unknown))
        self._resume()
        self._wake_to_look()
        if self.failure is not None:
            self._close()
        elif self.member.stopped:
            self._part()

    def _announce(self) -> None:
        items, self._inbox = self._inbox, []
        before: list[Entry] = []
        for item in items:  # in the order of submission, as in the daemon
            if isinstance(item, Entry):
                before.append(item)
            elif isinstance(item, Refused | Heard):
                self._admit(before)
                before = []
                if isinstance(item, Refused):
                    self._refuse(item)
                elif self.failure is None:
                    self._carry_out(self.member.settle(item))
        self._admit(before)
        if self._hurried and self.failure is None:
            self._carry_out(self.member.awaited())
        self._hurried = False
        for item in items:
            self._start(item)

    def _start(self, item: Work) -> None:
        """Starts an item that is neither announced nor refused."""
        if isinstance(item, Letter | Receipt):
            self._begin(item)
        elif not isinstance(item, Entry | Refused | Heard):
            item()

    def _admit(self, entries: list[Entry]) -> None:
        if self.failure is None:
            self._carry_out(self.member.announce(entries))
            return
        for entry in entries:
            entry.handle.fail(_peer_error(self.failure))

    def _wake_to_look(self) -> None:
        """Schedules a cycle for the next check of pending messages, or of whether the script is blocked."""
        if self.bag.letters and self.failure is None:
            self._wake(1.0)
        if self._blocks is None or self.failure is not None:
            return
        now = self._setting.agenda.now
        if (remaining := self._blocks.remaining(now)) is not None:
            self._wake(remaining + 1e-6)

    def _carry_out(self, due: Due) -> None:
        if self._blocks is not None and self._blocks.told and (due.words or due.messages):
            self._blocks.note_news(self._setting.agenda.now)
        for bucket in due.buckets:
            self._note(f"starts bucket {bucket.sequence}: {[entry.request.name for entry in bucket.entries]}")
            self._setting.payload.start(self.rank, bucket)
        self._queue.extend(due.buckets)
        for word in due.words:
            names = [entry.request.name for entry in word.bucket.entries] if word.bucket is not None else "invalid"
            self._note(f"gives its word on {word.lock}.{word.index}.{word.occurrence}: {names}")
            if word.bucket is not None:
                self._open.append(word)
            self._setting.words.give(self.rank, word, self._outcome_arrives)
            self._setting.payload.give(self.rank, word)
        for message in due.messages:
            if isinstance(message, Report):
                self._setting.ledger.report(self.rank, told(self.member, message), seen=message.seen)
                if not self._setting.settings.is_star:
                    self._setting.ledger.hear(self.rank)
            self.tell(message)

    @property
    def moving(self) -> bool:
        """Whether data is on its way; votes of other ranks may never come."""
        words = self._setting.words
        return bool(self._active or self._queue or any(not words.missing(word) for word in self._open))

    def tell(self, message: Message) -> None:
        """Sends a message to the coordinator."""
        self._note(f"says {message}")
        if self._hub is not None:
            self._hub.hear(self.rank, message, now=self._setting.agenda.now)
            self._wake(0.0)
        else:
            self._setting.network.send(self.rank, self._post.parent, message)

    def _listen(self) -> None:
        if self._hub is None:
            while self._mail:
                self._obey(*self._mail.popleft())
            return
        now = self._setting.agenda.now
        while self._mail:
            self._hub.hear(*self._mail.popleft(), now=now)
        for rank, message in self._hub.turn(now):
            if rank == self.rank:
                self._obey(rank, message)
            else:
                self._note(f"tells rank {rank} {message}")
                self._setting.network.send(self.rank, rank, message)
        if (deadline := self._hub.deadline) is not None:
            self._wake(deadline - now)

    def _obey(self, sender: int, message: Message | Lost) -> None:
        match message:
            case Plan() if self.failure is None:
                self._follow(message)
            case Abort():
                self._break(message.failure)
            case Inquiry():
                idle = self._setting.agenda.now - self._active_at
                self.tell(Account(self.rank, "in compute", "nothing", idle=idle))
            case StallReport():
                self._note(tell(message).replace("\n", " | "))
            case Welcome():
                self._note("is welcome")
                self._program = program(self, self._setting)
                self._awaited = []
            case Lost() if not self.member.stopped:
                self._break(Failure(sender, "died"))

    def _follow(self, plan: Plan) -> None:
        if plan.lock and self._blocks is not None:
            self._blocks.note_lock(self._setting.agenda.now)
        due = self.member.follow(plan)
        self._setting.caches.compare(self.member, plan.sequence)
        self._carry_out(due)
        if self.bag.follow(plan, self.member) and self._blocks is not None:
            self._blocks.note_news(self._setting.agenda.now)

    def _advance(self) -> None:
        flying = Counter(bucket.request.members for bucket in self._active.values())
        for bucket in list(self._queue):
            if flying[bucket.request.members] < _ACTIVE:
                flying[bucket.request.members] += 1
                self._queue.remove(bucket)
                self._active[bucket.sequence] = bucket
                self._setting.exchange.join(self.rank, bucket, self._data_arrives)

    def _data_arrives(self, bucket: Bucket) -> None:
        self._landed.append(bucket)
        self._wake(0.0)

    def _outcome_arrives(self, word: Locked, valid: bool) -> None:  # noqa: FBT001 - an outcome, not a switch
        self._outcomes.append((word, valid))
        self._wake(0.0)

    def _land(self) -> None:
        landed, self._landed = self._landed, []
        for bucket in landed:
            if self._active.pop(bucket.sequence, None) is not None:
                self._finish(bucket)
        outcomes, self._outcomes = self._outcomes, []
        for word, valid in outcomes:
            if word.bucket is None or word not in self._open:
                continue
            self._open.remove(word)
            self._note(f"hears that {word.lock}.{word.index}.{word.occurrence} has {'landed' if valid else 'failed'}")
            self._carry_out(self.member.landed(word) if valid else self.member.refused(word))
            if valid:
                self._finish(word.bucket)

    def _finish(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            self.member.table.release(entry)
            self._stall.observe(entry, self._setting.agenda.now)
            entry.finish(entry.array)

    def _watch(self) -> None:
        """Sends an overdue notice when an operation has waited too long."""
        oldest = self._stall.oldest(self.member.table)
        swarm = self._setting.swarm
        if not (swarm.stall or swarm.polling) or self.failure is not None or oldest is None:
            return
        now = self._setting.agenda.now
        waited = now - oldest
        if self._stall.overdue(waited):
            if swarm.polling:  # otherwise a waiting thread has already hurried the daemon, and that must suffice
                self._carry_out(self.member.unlock())
            self.tell(self._overdue(now, waited))
        self._wake(self._stall.remaining(waited) + 1e-6)

    def _overdue(self, now: float, waited: float) -> Overdue:
        """Returns the overdue operations; for locked ones only the data plane knows the missing ranks."""
        late = self._stall.late(self.member.table, now)
        words = {entry.request.name: word for word in self._open if word.bucket for entry in word.bucket.entries}
        locked = [Waiting(name, LOCKED, self._setting.words.missing(words[name])) for name in late if name in words]
        return Overdue(waited, tuple(name for name in late if name not in words), tuple(locked))

    # The main thread.

    def _resume(self) -> None:
        """Continues the program if every operation that it waits for is done."""
        self._note_waits()
        if self._program is None or self._awaited is None or not all(made.poll() for made in self._awaited):
            return
        self._awaited = None
        match next(self._program, None):
            case None:
                self._program = None
            case float() as seconds:
                self._setting.agenda.after(seconds, self._awake)
            case list() as awaited:
                self._awaited = awaited
                self._hurried = not (self._setting.swarm.polling or all(made.poll() for made in awaited))
                self._wake(0.0)
            case (made, seconds):
                self._awaited = awaited = [made]
                self._hurried = not made.poll()
                self._setting.agenda.after(seconds, lambda: self._break_off(awaited))
                self._wake(0.0)
        self._note_waits()

    @property
    def has_submitted(self) -> bool:
        """Whether the script has submitted something that the daemon has not taken yet."""
        return any(isinstance(item, Entry | Letter | Receipt) for item in self._inbox)

    @property
    def waits_for(self) -> Made | None:
        """The operation for which the script blocks; None if it does not wait, or polls."""
        if self._awaited is None or self._setting.swarm.polling:
            return None
        return next((made for made in self._awaited if not made.poll()), None)

    def _note_waits(self) -> None:
        """Updates the ledger with the operation that the script waits for, and the block watch if it is a new one."""
        if self._blocks is None:
            return
        made = self.waits_for
        if made is not self._noted:
            self._noted = made
            if made is not None:
                self._blocks.note_wait(self._setting.agenda.now)
                self._wake(0.0)
        self._setting.ledger.waits.begin(self.rank, made.turn if made is not None and not self._beside else None)

    def _break_off(self, awaited: list[Made]) -> None:
        """Ends a wait by an exception, as from a signal handler, unless it has ended."""
        if self._awaited is not awaited or all(made.poll() for made in awaited) or self.closed:
            return
        if (frozen := self._frozen_until - self._setting.agenda.now) > 0:
            self._setting.agenda.after(frozen, lambda: self._break_off(awaited))
            return
        self._note("breaks its wait off")
        self._awaited, self._noted = [], None
        if (blocks := self._blocks) is not None:
            self._setting.ledger.waits.break_off(self.rank, told=blocks.told)
            self._inbox.append(lambda: blocks.note_news(self._setting.agenda.now))
        self._wake(0.0)

    def _awake(self) -> None:
        self._awaited = []
        self._wake(0.0)

    # The end.

    def _leave(self) -> None:
        if self.failure is None:
            self._carry_out(self.member.leave())
            self._setting.ledger.gone.add(self.rank)
            self.tell(Goodbye(traffic=self.bag.traffic))
            if self.doomed:
                self._setting.agenda.after(0.0, self.crash)

    def _refuse(self, refused: Refused) -> None:
        if self.failure is None:
            self._carry_out(self.member.refuse(refused))
            if (told := self.member.told(refused)) is not None:
                self.tell(told)

    def _report_failure(self, failure: Failure) -> None:
        if self.failure is None:
            self.tell(Abort(failure))
            self._break(failure)

    def _break(self, failure: Failure) -> None:
        if self.failure is not None:
            return
        self._note(f"knows that rank {failure.rank} {failure.reason}")
        self.failure = failure
        self._setting.ledger.failed = True
        self._setting.payload.stop(self.rank)
        flying = [entry for bucket in [*self._active.values(), *self._queue] for entry in bucket.entries]
        self._open.clear()
        self._active.clear()
        self._queue.clear()
        for entry in dict.fromkeys([*flying, *self.member.table.clear()]):
            entry.handle.fail(_peer_error(failure))
        for receipt in self.bag.clear():
            receipt.fail(_peer_error(failure))

    def _part(self) -> None:
        """Ends the process once all operations are done, or after a while, if a rank has died after its goodbye."""
        now = self._setting.agenda.now
        self._parting = now + _FAREWELL if self._parting is None else self._parting
        if (self._active or self._queue or self._open) and now < self._parting:
            self._wake(self._parting - now)
            return
        for entry in self.member.table.clear():
            entry.handle.fail(ShutdownError(entry.request.name))
        self._close()

    def _close(self) -> None:
        """Ends the process; items in its inbox fail."""
        self.closed = True
        self._note("ends")
        for item in self._inbox:
            if isinstance(item, Entry | Receipt) and self.failure is not None:
                (item.handle if isinstance(item, Entry) else item).fail(_peer_error(self.failure))
        self._setting.network.close(self.rank, self._neighbours, crashed=False)

    def _note(self, what: str) -> None:
        self._setting.trace.note(f"rank {self.rank}", what)


class _Watch(BlockWatch):
    """The real `BlockWatch`, without the inspection of a process's threads."""

    def __init__(self, process: Process) -> None:
        super().__init__(
            process.member.table,
            thread=lambda: 0,
            busy=lambda: process.moving,
            submitted=lambda: process.has_submitted,
            tell=self._tell_process,
            mail=process.bag,
        )
        self._process = process
        self._last = Blocked()

    def _tell_process(self, awaits: Awaited, *, again: bool) -> None:
        blocked = describe(awaits, self._process.member, self._process.bag)
        if not again or not same(blocked, self._last):
            self._last = blocked
            self._process.tell(blocked)

    def _awaited(self) -> Awaited:
        made, table = self._process.waits_for, self._process.member.table
        if isinstance(made, Receipt):
            known = made in self._process.bag
            return Awaited(made.name, made.peer, made.number, made.submitted) if known else Awaited()
        known = made is not None and made.name in table and table.find(made.name).handle is made
        return Awaited(made.name, since=made.submitted) if made is not None and known else Awaited()

    def _others_may_submit(self) -> bool:
        return self._process.busy_beside


def _peer_error(failure: Failure) -> PeerError:
    return PeerError(failure.rank, failure.reason)
