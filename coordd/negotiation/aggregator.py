"""The aggregator: a rank's role in a tree of coordinators; it merges and forwards the messages of the ranks below.

Pure: messages and the time go in, messages come out. The same object runs in the daemons and in the simulators. Rule:
a message that all ranks below have sent goes up at once, and any other waits only a moment for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from coordd.negotiation.channel import Lost
from coordd.negotiation.coordinator import Coordinator, Outgoing
from coordd.negotiation.deadlock import BlockedSums
from coordd.negotiation.tally import Tally
from coordd.negotiation.tree import NOBODY, Post
from coordd.negotiation.wire import mask
from coordd.ops.messages import (
    Abort,
    Account,
    Blocked,
    Failure,
    Flushed,
    Goodbye,
    Hello,
    Inquiry,
    Loss,
    Message,
    Muster,
    Overdue,
    Plan,
    Refused,
    Report,
    Waiting,
    Welcome,
)

__all__ = ["Foreman", "Hub", "Root", "hub"]

_COMPANY = 0.1
"""Seconds that messages of some ranks wait for equal messages of the others."""


def hub(
    post: Post,
    coordinate: Callable[[Sequence[int] | None], Coordinator],
    *,
    batch: int = 32,
    stopped: Callable[[int], bool] = lambda _: False,
) -> Hub | None:
    """Creates the hub of a rank, which receives the messages of others; None if no rank reports to this one.

    Args:
        post: its place in the tree.
        coordinate: creates the coordinator of rank 0, given its reporters.
        batch: number of new tensors that aggregators compare as a whole.
        stopped: returns whether the process of a rank is known to be stopped.
    """
    if post.parent == NOBODY and post.is_star:
        return coordinate(None)
    foreman = Foreman(post, batch=batch, stopped=stopped)
    if post.parent == NOBODY:
        return Root(foreman, coordinate([post.span]))
    return foreman if post.children else None


class Foreman:
    """Aggregates messages between a parent and several children, one of which is its own rank."""

    def __init__(self, post: Post, *, batch: int = 32, stopped: Callable[[int], bool] = lambda _: False) -> None:
        """Starts before any rank has arrived; see `hub`."""
        self._post = post
        self._is_stopped = stopped
        self._tally = Tally(post.spans, batch=batch)
        self._arrived: dict[int, Hello] = {}
        self._welcome: Welcome | None = None
        self._leaving = 0
        self._senders: list[Goodbye] = []
        self._blocked = BlockedSums()
        self._complaints: dict[tuple[tuple[str, ...], tuple[Waiting, ...]], tuple[int, float]] = {}
        self._stopped = False
        self._up: list[Message] = []
        self._down: Outgoing = []
        self._deadline: float | None = None

    @property
    def deadline(self) -> float | None:
        """When `turn` must be called even if no message arrives."""
        return self._deadline

    def hear(self, sender: int, message: Message | Lost, *, now: float) -> None:  # noqa: ARG002 - like the coordinator
        """Processes one message, from a child or from the parent."""
        if sender == self._post.parent:
            self._instruct(message)
        else:
            self._collect(sender, message)

    def turn(self, now: float) -> Outgoing:
        """Returns the messages to send, in order: to the parent, to children, and last to this rank itself."""
        late = self._deadline is not None and now >= self._deadline
        self._up = [*self._blocked.freed(), *self._up]  # before the announcements of those ranks
        self._up += self._tally.turn(late=late or self._leaving == self._post.span)
        if late or self._leaving == self._post.span:
            self._say_goodbye()
        if late:
            self._complain()
            self._up += self._blocked.told()  # after all announcements of those ranks
        if not self._holds():
            self._deadline = None
        elif self._deadline is None:
            self._deadline = now + _COMPANY
        out = [*((self._post.parent, message) for message in self._up), *self._down]
        self._up, self._down = [], []
        return out

    # From below.

    def _collect(self, child: int, message: Message | Lost) -> None:
        match message:
            case Report():
                self._tally.hear(child, message)
            case Goodbye() | Overdue() | Refused() | Flushed() | Blocked():
                self._gather(child, message)
            case Hello() | Muster():
                self._arrive(message.by_rank() if isinstance(message, Muster) else {child: message})
            case Lost():
                self._up += [] if self._stopped else [Loss(child, self._is_stopped(child))]
            case Abort():
                self._up.append(message)
                self._instruct(message)  # this process may end before the message returns from the root
            case _:
                self._up.append(message)

    def _gather(self, child: int, message: Goodbye | Overdue | Refused | Flushed | Blocked) -> None:
        match message:
            case Goodbye():
                self._leaving |= self._speakers(child, message.ranks)
                if message.traffic is not None:
                    self._senders.append(Goodbye(mask(self._speakers(child, message.ranks)), message.traffic))
            case Overdue():
                self._note_complaint(child, message)
            # Flush first: a join that arrives later, but goes up earlier, would complete a call that is refused.
            case Refused() | Flushed():
                self._up += [*self._blocked.freed(), *self._tally.turn(late=True), message]
            case Blocked():
                self._blocked.hear(self._speakers(child, message.ranks), message)

    def _speakers(self, child: int, ranks: bytes) -> int:
        return int.from_bytes(ranks, "little") or self._post.spans[child]

    def _arrive(self, hellos: Mapping[int, Hello]) -> None:
        self._arrived.update(hellos)
        if len(self._arrived) == self._post.span.bit_count():
            self._up.append(Muster(mask(self._post.span), tuple(self._arrived[rank] for rank in sorted(self._arrived))))

    def _note_complaint(self, child: int, overdue: Overdue) -> None:
        """Merges the reports of ranks that wait for the same operations."""
        what = (overdue.names, overdue.matched)
        ranks, seconds = self._complaints.get(what, (0, 0.0))
        self._complaints[what] = (ranks | self._speakers(child, overdue.ranks), max(seconds, overdue.seconds))

    # Upwards.

    def _holds(self) -> bool:
        return bool(self._leaving or self._complaints or self._blocked) or self._tally.holds

    def _say_goodbye(self) -> None:
        """Goes up after everything that the leaving ranks have announced."""
        if self._leaving:
            rest = self._leaving & ~sum(int.from_bytes(each.ranks, "little") for each in self._senders)
            self._up += [*self._senders, *([Goodbye(mask(rest))] if rest else [])]
            self._leaving = 0
            self._senders = []

    def _complain(self) -> None:
        for (names, matched), (ranks, seconds) in self._complaints.items():
            self._up.append(Overdue(seconds, names, matched, mask(ranks)))
        self._complaints.clear()

    # Downwards.

    def _instruct(self, message: Message | Lost) -> None:
        ranks = self._post.span
        match message:
            case Plan():
                self._blocked.follow(message)
                self._tally.follow(message)
                self._stopped = self._stopped or message.stop
            case Welcome():
                self._welcome = message
            case Inquiry() | Account():
                ranks = _audience(message)
            case Lost() if self._stopped:
                return
            case Lost():
                parent = self._post.parent
                message = Abort(Failure.death(parent, self._place(parent), stopped=self._is_stopped(parent)))
        for child in (*self._post.children, self._post.rank):
            if self._post.spans[child] & ranks:
                self._down.append((child, message))

    def _place(self, rank: int) -> str:
        welcome = self._welcome
        return f"pid {welcome.pids[rank]} on {welcome.hosts[rank]}" if welcome and welcome.pids else "not yet arrived"


def _audience(message: Inquiry | Account) -> int:
    """Returns the recipients of a message that is not for all ranks, as a bit mask."""
    return 1 << message.asker if isinstance(message, Account) else sum(1 << rank for rank in message.ranks)


class Root:
    """Rank 0 of a tree: the aggregator of all ranks, and the coordinator, which receives messages only from it."""

    def __init__(self, foreman: Foreman, coordinator: Coordinator) -> None:
        """Combines the two; the coordinator has one reporter, which stands for all ranks."""
        self._foreman = foreman
        self._coordinator = coordinator

    @property
    def deadline(self) -> float | None:
        """When `turn` must be called even if no message arrives."""
        times = [time for time in (self._foreman.deadline, self._coordinator.deadline) if time is not None]
        return min(times, default=None)

    def hear(self, sender: int, message: Message | Lost, *, now: float) -> None:
        """Processes one message."""
        self._foreman.hear(sender, message, now=now)

    def turn(self, now: float) -> Outgoing:
        """Returns the messages to send, in order."""
        found: Outgoing = []
        while True:
            for rank, message in self._foreman.turn(now):
                if rank == NOBODY:
                    self._coordinator.hear(0, message, now=now)
                else:
                    found.append((rank, message))
            answers = self._coordinator.turn(now)
            if not answers:
                return found
            for _, message in answers:
                self._foreman.hear(NOBODY, message, now=now)


Hub = Coordinator | Foreman | Root
"""The object that other ranks report to."""
