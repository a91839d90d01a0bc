"""The coordinator on rank 0: it receives the messages of all ranks and decides what they do.

Pure: messages and the time go in, messages come out. The same object runs in the daemon of rank 0 and in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from coordd.errors import spans
from coordd.negotiation.ballot import lowest
from coordd.negotiation.channel import Lost
from coordd.negotiation.message_table import Negotiator
from coordd.ops.messages import (
    Abort,
    Account,
    Blocked,
    Expecting,
    Failure,
    Flushed,
    Goodbye,
    Hello,
    Inquiry,
    Kind,
    Loss,
    Message,
    Muster,
    Overdue,
    Plan,
    Recording,
    Refused,
    Report,
    StallReport,
    Waiting,
    Welcome,
)

__all__ = ["Coordinator", "Outgoing"]

_PATIENCE = 1.0
"""Seconds that ranks have to answer an inquiry."""
_ASKED = 64
"""Most ranks that are asked: a person has to read their stacks."""

_STALLED = Inquiry()
_JOIN = Kind.JOIN.name.lower()

Outgoing = list[tuple[int, Message]]


@dataclass
class _Investigation:
    """A stall under investigation: the overdue operations that ranks, by bit mask, report, and which were asked when.

    While it is ``settling`` a lock has just been broken, and ranks have yet to announce the tensors that it held.
    """

    deadline: float
    settling: bool = False
    overdue: dict[int, Overdue] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    accounts: dict[int, Account] = field(default_factory=dict)

    def idle(self, ranks: Iterable[int]) -> float:
        """Returns the asked ranks' longest idle time in seconds; infinite if one has not answered, or none was asked.

        The wait of a joined rank is a stall only if that is at least as long as its wait.
        """
        answers = (self.accounts.get(rank) for rank in ranks if rank in self.asked)
        return max((answer.idle if answer else math.inf for answer in answers), default=math.inf)


class Coordinator:
    """The coordinator of a star, or behind the aggregator at the root of a tree."""

    def __init__(  # noqa: PLR0913 - one argument per setting
        self,
        size: int,
        *,
        cache_capacity: int,
        fusion_bytes: int,
        lock_steps: int = 0,
        abort_seconds: float = 0.0,
        voices: Sequence[int] | None = None,
        stopped: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Starts before any rank has arrived.

        Args:
            size: number of ranks.
            cache_capacity: slots of the response cache.
            fusion_bytes: size of a fusion bucket.
            lock_steps: equal steps that lock the plan; 0 for never.
            abort_seconds: how long an operation may wait before the job fails; 0 for no limit.
            voices: the reporters, each as the bit mask of the ranks that it reports for; by default each rank for
                itself.
            stopped: returns whether the process of a rank is known to be stopped.
        """
        self._ranks = range(size)
        self._voices = [1 << rank for rank in self._ranks] if voices is None else voices
        self._negotiator = Negotiator(
            size,
            cache_capacity=cache_capacity,
            fusion_bytes=fusion_bytes,
            lock_steps=lock_steps,
            voices=self._voices,
        )
        self._abort_seconds = abort_seconds
        self._is_stopped = stopped
        self._arrived: dict[int, Hello] = {}
        self._investigation: _Investigation | None = None
        self._failure: Failure | None = None
        self._stopped = False
        self._plans = 0
        self._recordings = 0
        self._out: Outgoing = []
        self._heard = False

    @property
    def deadline(self) -> float | None:
        """When `turn` must be called even if no message arrives."""
        return self._investigation.deadline if self._investigation else None

    def hear(self, voice: int, message: Message | Lost, *, now: float) -> None:
        """Processes one message of a reporter."""
        self._heard = True
        match message:
            case Report() | Refused() | Flushed() | Blocked() | Goodbye() | Expecting():
                self._negotiate(voice, message)
            case Hello() | Muster():
                self._greet(message.by_rank() if isinstance(message, Muster) else {voice: message})
            case Abort():
                self._fail(message.failure)
            case Overdue():
                self._investigate(self._speakers(voice, message.ranks), message, now)
            case Inquiry() | Account():
                self._mediate(message)
            case Lost() | Loss():
                self._lose(message if isinstance(message, Loss) else Loss(voice, self._is_stopped(voice)))
            case _:
                self._pass_on(message)

    def _negotiate(self, voice: int, message: Report | Refused | Flushed | Blocked | Goodbye | Expecting) -> None:
        match message:
            case Report():
                self._negotiator.hear(voice, message)
            case Refused():
                self._negotiator.refuse(message)
            case Flushed():
                self._negotiator.acknowledge(1 << message.rank, message.plan)
            case Blocked():
                self._negotiator.note_blocked(self._speakers(voice, message.ranks), message)
            case Goodbye():
                self._negotiator.leave(self._speakers(voice, message.ranks), message.traffic)
            case Expecting():
                self._negotiator.expect(message.peers)

    def turn(self, now: float) -> Outgoing:
        """Returns the messages to send, each with its reporter, in order; messages to rank 0 itself included."""
        heard, self._heard = self._heard, False
        if heard and self._failure is None:
            if (plan := self._negotiator.decide()) is not None:
                self._plans = plan.sequence
                self._tell(range(len(self._voices)), plan)
            if self._negotiator.finished and not self._stopped:
                self._stopped = True
                last = Plan(self._plans + 1, stop=True, left=self._negotiator.leavers.untold)
                self._tell(range(len(self._voices)), last)
        self._conclude(now)
        out, self._out = self._out, []
        return out

    def _tell(self, voices: Iterable[int], message: Message) -> None:
        self._out += [(voice, message) for voice in voices]

    def _speakers(self, voice: int, ranks: bytes) -> int:
        """Returns the bit mask of the ranks that a message is from: its ``ranks``, or all ranks of the reporter."""
        return int.from_bytes(ranks, "little") or self._voices[voice]

    def _place(self, rank: int) -> str:
        hello = self._arrived.get(rank)
        return f"pid {hello.pid} on {hello.host}" if hello else "not yet arrived"

    def _greet(self, hellos: dict[int, Hello]) -> None:
        """Records arrived ranks; when all have arrived, welcomes them, or rejects them if they do not fit together."""
        self._arrived |= hellos
        if len(self._arrived) < len(self._ranks):
            return
        everybody = [self._arrived[rank] for rank in self._ranks]
        refusal = ""
        for what, values in (
            ("versions of coordd", [hello.version for hello in everybody]),
            ("settings", [hello.digest for hello in everybody]),
        ):
            if len(set(values)) > 1:
                groups = {value: [r for r in self._ranks if values[r] == value] for value in dict.fromkeys(values)}
                told = "; ".join(f"ranks {spans(ranks)}: {value}" for value, ranks in groups.items())
                refusal = f"the ranks have different {what} ({told}): make them equal"
        pids, hosts = tuple(hello.pid for hello in everybody), tuple(hello.host for hello in everybody)
        self._tell(range(len(self._voices)), Welcome(pids, hosts, refusal))

    def _pass_on(self, message: Message) -> None:
        """Sends to all ranks to start or stop a recording; of several ranks' requests the first one counts."""
        if isinstance(message, Recording) and message.number > self._recordings:
            self._recordings = message.number
            self._tell(range(len(self._voices)), message)

    def _lose(self, loss: Loss) -> None:
        if not self._stopped:
            self._fail(Failure.death(loss.rank, self._place(loss.rank), stopped=loss.stopped))

    def _fail(self, failure: Failure) -> None:
        """Sends the first failure to all ranks; later ones are its consequences."""
        if self._failure is None:
            self._failure = failure
            self._tell(range(len(self._voices)), Abort(failure))

    def _investigate(self, ranks: int, overdue: Overdue, now: float) -> None:
        """Sends an inquiry to the missing ranks; overdue reports that arrive meanwhile join the same stall report."""
        waiting = self._waiting(ranks, overdue)
        asked = {rank for item in waiting for rank in item.missing} or set(self._ranks)
        blocked = [item for item in waiting if item.operation != _JOIN]
        if blocked and not self._negotiator.unlocking and self._intolerable(overdue.seconds):
            self._blame(blocked, overdue.seconds)
            return
        case = self._investigation = self._investigation or _Investigation(now + _PATIENCE)
        case.settling |= self._negotiator.unlocking
        case.overdue[ranks] = overdue
        new = sorted(asked - case.asked.keys())[: max(0, _ASKED - len(case.asked))]
        self._ask(new)
        case.asked = dict.fromkeys(new, now) | case.asked

    def _ask(self, ranks: Sequence[int], question: Inquiry = _STALLED) -> None:
        for voice, span in enumerate(self._voices):
            if mine := tuple(rank for rank in ranks if span >> rank & 1):
                alone = span == 1 << voice
                self._tell([voice], msgspec.structs.replace(question, ranks=() if alone else mine))

    def _mediate(self, message: Inquiry | Account) -> None:
        """Routes status queries and their replies."""
        if isinstance(message, Inquiry):
            self._ask(message.ranks, message)
        elif message.number:
            self._tell([voice for voice, span in enumerate(self._voices) if span >> message.asker & 1], message)
        elif self._investigation is not None:
            self._investigation.accounts[message.rank] = message

    def _intolerable(self, seconds: float) -> bool:
        return 0 < self._abort_seconds <= seconds

    def _blame(self, waiting: list[Waiting], seconds: float) -> None:
        """Fails the job because of the lowest rank that others wait for."""
        culprit = min((rank for item in waiting for rank in item.missing), default=0)
        names = ", ".join(repr(item.name) for item in waiting[:3])
        state = "; its process is stopped, by SIGSTOP, SIGTSTP or a debugger" if self._is_stopped(culprit) else ""
        self._fail(Failure(culprit, f"kept {names} waiting for {seconds:.0f} s (stall_abort_seconds){state}"))

    def _waiting(self, ranks: int, overdue: Overdue) -> list[Waiting]:
        announced: dict[str, list[Waiting]] = {}
        for item in self._negotiator.waiting(ranks):
            announced.setdefault(item.name, []).append(item)
        mine = [item for name in overdue.names for item in announced.get(name, [Waiting(name, "transfer")])]
        return [*mine, *overdue.matched]

    def _conclude(self, now: float) -> None:
        """Ends an investigation when all ranks have answered or the time is up, and sends the report to all ranks."""
        case = self._investigation
        if case is None:
            return
        if now < case.deadline and (case.settling or case.asked.keys() - case.accounts.keys()):
            return
        self._investigation = None
        complaints = [(ranks, case.overdue[ranks]) for ranks in sorted(case.overdue, key=lowest)]
        waiting = [
            item
            for ranks, overdue in complaints
            for item in self._waiting(ranks, overdue)
            if item.operation != _JOIN or case.idle(item.missing) >= overdue.seconds
        ]
        seconds = max(overdue.seconds for overdue in case.overdue.values())
        if waiting and self._intolerable(seconds):
            self._blame(waiting, seconds)
            return
        # A rank that was asked late has had no time to answer, so its silence means nothing yet.
        late = [rank for rank, since in case.asked.items() if since + _PATIENCE <= now]
        report = StallReport(
            seconds,
            tuple(dict.fromkeys(waiting)),
            tuple(case.accounts[rank] for rank in sorted(case.accounts)),
            tuple(sorted(set(late) - case.accounts.keys())),
        )
        self._tell(range(len(self._voices)), report)
