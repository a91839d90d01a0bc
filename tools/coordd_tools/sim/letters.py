"""Sends and receives of simulated ranks; messages arrive some time after their send, in order for each pair."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from coordd.errors import PeerError, ShutdownError, is_deadlock
from coordd.negotiation.worker import Member
from coordd.ops.handles import Handle
from coordd.ops.messages import Plan, Traffic
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.ledger import Ledger, demand

__all__ = ["Letter", "Mailbag", "Receipt", "Routes"]

_USUAL, _LATE = 1e-3, 3.0
_LATENESS = 0.2
"""Fraction of messages that are in flight for longer than a rank takes to report that it is blocked."""


@dataclass(frozen=True, eq=False)
class Letter:
    """A message from one rank to another, with a unique name.

    A ``large`` message is sent only when the receiver takes it.
    """

    name: str
    sender: int
    receiver: int
    large: bool = False


@dataclass(frozen=True)
class Part:
    """One end of a message, which waits until the other end does its part."""

    letter: Letter
    outgoing: bool

    @property
    def members(self) -> tuple[int, ...]:
        """The two ranks; the waiting one comes last."""
        ends = (self.letter.sender, self.letter.receiver)
        return ends[::-1] if self.outgoing else ends


class Receipt(Handle[object]):
    """The handle of a receive, or of the send of a large message."""

    __slots__ = ("_ledger", "handle", "number", "peer", "rank", "turn")

    def __init__(self, ledger: Ledger, letter: Letter, *, outgoing: bool) -> None:
        super().__init__(letter.name)
        self.turn = Part(letter, outgoing)
        self.peer, self.rank = self.turn.members
        self.handle = self
        self.number = 0  # the number of a send
        self._ledger = ledger
        ledger.receipts.append(self)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def resolve(self, result: object) -> None:
        """Completes it; checks that the other end has done its part."""
        demand(self.turn in self._ledger.ended, f"{self!r} came, but was not sent, or was sent, but did not come")
        super().resolve(result)

    def fail(self, error: BaseException) -> None:
        """Fails it; checks that ranks wait for each other, or that a rank has failed or left."""
        true = is_deadlock(error) or (isinstance(error, PeerError) and self._ledger.failed)
        gone = isinstance(error, ShutdownError) and error.ranks == (self.peer,) and self.peer in self._ledger.gone
        demand(true or (gone and self.turn not in self._ledger.ended), f"{self!r} failed with {error!r}")
        super().fail(error)


class Routes:
    """Carries messages between ranks, and the notices that they were taken."""

    def __init__(self, agenda: Agenda, rng: Random, ledger: Ledger) -> None:
        self._agenda = agenda
        self._rng = rng
        self.ledger = ledger
        self._last: dict[tuple[int, int], float] = {}
        self.bags: dict[int, Mailbag] = {}

    def send(self, letter: Letter) -> None:
        """Sends a message."""
        self.ledger.ended.add(Part(letter, outgoing=False))
        self._carry(letter.sender, letter.receiver, lambda: self.bags[letter.receiver].arrive(letter))

    def take(self, letter: Letter) -> None:
        """Notifies the sender of a large message that the receiver has taken it."""
        if letter.large:
            self.ledger.ended.add(Part(letter, outgoing=True))
            self._carry(letter.receiver, letter.sender, lambda: self.bags[letter.sender].note_taken(letter))

    def _carry(self, sender: int, receiver: int, arrive: Callable[[], None]) -> None:
        mean = _LATE if self._rng.random() < _LATENESS else _USUAL
        time = self._agenda.now + self._rng.expovariate(1 / mean)
        time = self._last[sender, receiver] = max(time, self._last.get((sender, receiver), 0.0))
        self._agenda.at(time, arrive)


class Mailbag:
    """The sends and receives of one rank."""

    def __init__(self, rank: int, routes: Routes, *, wake: Callable[[], None]) -> None:
        """Starts with nothing in flight; ``wake`` makes the rank check its messages when one has arrived."""
        self._routes = routes
        self._wake = wake
        self._come: deque[Letter] = deque()
        self._taken: deque[Letter] = deque()
        self._early: dict[Letter, int] = {}
        self._wanted: dict[Letter, Receipt] = {}
        self._offered: dict[Letter, Receipt] = {}
        self._asked: set[int] = set()
        self._left: dict[int, Traffic] = {}
        self._sent: Counter[int] = Counter()
        self._heard: Counter[int] = Counter()
        routes.bags[rank] = self

    def __contains__(self, receipt: object) -> bool:
        return receipt in self.letters

    @property
    def wanted(self) -> list[Any]:
        """The receives whose message has not arrived."""
        return [*self._wanted.values()]

    @property
    def offered(self) -> list[Any]:
        """The sends of large messages that have not been taken."""
        return [*self._offered.values()]

    @property
    def letters(self) -> list[Any]:
        """All pending receives and sends."""
        return [*self.wanted, *self.offered]

    @property
    def unclaimed(self) -> list[tuple[int, int]]:
        """The large messages that have arrived before their receive, by sender and number."""
        return sorted((letter.sender, number) for letter, number in self._early.items() if letter.large)

    @property
    def sent(self) -> list[tuple[int, int]]:
        """The numbers of messages that this rank has sent, by receiver."""
        return sorted(self._sent.items())

    def heard(self, sender: int) -> int:
        """Returns the number of messages delivered from a rank."""
        return self._heard[sender]

    def send(self, letter: Letter, receipt: Receipt | None) -> None:
        """Sends a message; a large message has a receipt."""
        self._sent[letter.receiver] += 1
        self._routes.send(letter)
        if receipt is not None:
            receipt.number = self._sent[letter.receiver]
            self._offered[letter] = receipt
            self._end()

    def receive(self, receipt: Receipt) -> None:
        """Starts a receive."""
        letter = receipt.turn.letter
        if letter in self._early:
            del self._early[letter]
            self._routes.take(letter)
            receipt.resolve(None)
        else:
            self._wanted[letter] = receipt
            self._end()

    def arrive(self, letter: Letter) -> None:
        """Queues an arriving message until the next `deliver`."""
        self._come.append(letter)
        self._wake()

    def note_taken(self, letter: Letter) -> None:
        """Queues the notice that the receiver has taken a message."""
        self._taken.append(letter)
        self._wake()

    def deliver(self) -> bool:
        """Processes arrived messages and notices; returns whether there were any."""
        moved = bool(self._come or self._taken)
        while self._come:
            letter = self._come.popleft()
            self._heard[letter.sender] += 1
            if (receipt := self._wanted.pop(letter, None)) is None:
                self._early[letter] = self._heard[letter.sender]
            else:
                self._routes.take(letter)
                receipt.resolve(None)
        self._end()
        while self._taken:
            if (receipt := self._offered.pop(self._taken.popleft(), None)) is not None:
                receipt.resolve(None)
        return moved

    def give_up(self, peer: int, name: str, number: int) -> list[Receipt]:
        """Removes and returns the pending receives of a name from a peer, or, given a number, the pending send."""
        where = self._offered if number else self._wanted
        found = [
            letter for letter, each in where.items() if (each.peer, each.name, each.number) == (peer, name, number)
        ]
        return [where.pop(letter) for letter in found]

    @property
    def traffic(self) -> Traffic | None:
        """The counts that ranks which exchange messages with this one need when it leaves; None if there were none."""
        if not (self._sent or self._heard):
            return None
        early = sorted((letter.sender, number) for letter, number in self._early.items())
        return Traffic(tuple(self.sent), tuple(sorted(self._heard.items())), tuple(early))

    def old(self, now: float) -> tuple[int, ...]:
        """Returns the peers of sends and receives that have been pending for a second, each peer once."""
        found = {each.peer for each in self.letters if each.submitted <= now - 1.0} - self._asked
        self._asked |= found
        return tuple(sorted(found))

    def follow(self, plan: Plan, member: Member) -> bool:
        """Fails sends and receives that a plan gives up; returns whether the script's wait may have ended by that."""
        self._left |= {left.rank: left.traffic for left in plan.left}
        failed = False
        for each in plan.unmatched:
            if each.rank == member.rank:
                for receipt in self.give_up(each.peer, each.name, each.number):
                    receipt.fail(member.deadlocks.error(each, plan.sequence))
                    failed = True
            if each.peer == member.rank and each.number:
                self.drop(each.rank, each.number)
        self._end()
        return failed

    def _end(self) -> None:
        """Fails sends and receives whose peer has left without its part."""
        for receipt in [each for each in self.letters if each.peer in self._left]:
            traffic = self._left[receipt.peer]
            heard = dict(traffic.heard).get(receipt.rank, 0)
            if receipt.number:
                over = receipt.number > heard or (receipt.rank, receipt.number) in traffic.unclaimed
            else:
                over = self._heard[receipt.peer] >= dict(traffic.sent).get(receipt.rank, 0)
            if over:
                self.give_up(receipt.peer, receipt.name, receipt.number)
                receipt.fail(ShutdownError(receipt.name, (receipt.peer,)))

    def drop(self, sender: int, number: int) -> None:
        """Forgets an arrived message whose send has failed at its sender."""
        for letter in [each for each, count in self._early.items() if (each.sender, count) == (sender, number)]:
            del self._early[letter]
            self._routes.ledger.ended.discard(Part(letter, outgoing=False))

    def clear(self) -> list[Receipt]:
        """Removes and returns all pending receives and sends."""
        found = self.letters
        self._wanted, self._offered = {}, {}
        return found
