"""Sends and receives of simulated ranks: a message comes some time after it was sent, those of a pair in order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from coordd.errors import PeerError, ShutdownError, is_deadlock
from coordd.handles import Handle
from coordd.member import Member
from coordd.messages import Plan, Traffic
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.ledger import Ledger, demand

__all__ = ["Letter", "Mailbag", "Receipt", "Routes"]

_USUAL, _LATE = 1e-3, 3.0
_LATENESS = 0.2
"""So many messages are under way for longer than it takes a rank to say that it is blocked."""


@dataclass(frozen=True, eq=False)
class Letter:
    """A message from one rank to another, which has a name of its own.

    A ``large`` one is sent only when the receiver takes it.
    """

    name: str
    sender: int
    receiver: int
    large: bool = False


@dataclass(frozen=True)
class Part:
    """What one end of a message waits for: that the other one does its part."""

    letter: Letter
    outgoing: bool

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that it concerns; the one that waits comes last."""
        ends = (self.letter.sender, self.letter.receiver)
        return ends[::-1] if self.outgoing else ends


class Receipt(Handle[object]):
    """A receive of one rank, or the send of a large message."""

    __slots__ = ("_ledger", "handle", "number", "peer", "rank", "turn")

    def __init__(self, ledger: Ledger, letter: Letter, *, outgoing: bool) -> None:
        super().__init__(letter.name)
        self.turn = Part(letter, outgoing)
        self.peer, self.rank = self.turn.members
        self.handle = self
        self.number = 0  # of a send
        self._ledger = ledger
        ledger.receipts.append(self)

    @property
    def failed(self) -> bool:
        """Whether it has ended badly."""
        return self._error is not None

    def resolve(self, result: object) -> None:
        """Ends well: the other end has done its part."""
        demand(self.turn in self._ledger.ended, f"{self!r} came, but was not sent, or was sent, but did not come")
        super().resolve(result)

    def fail(self, error: BaseException) -> None:
        """Ends badly: ranks have waited for each other, or one has failed."""
        true = is_deadlock(error) or (isinstance(error, PeerError) and self._ledger.failed)
        gone = isinstance(error, ShutdownError) and error.ranks == (self.peer,) and self.peer in self._ledger.gone
        demand(true or (gone and self.turn not in self._ledger.ended), f"{self!r} failed with {error!r}")
        super().fail(error)


class Routes:
    """Carries messages between ranks, and back that they are taken."""

    def __init__(self, agenda: Agenda, rng: Random, ledger: Ledger) -> None:
        self._agenda = agenda
        self._rng = rng
        self.ledger = ledger
        self._last: dict[tuple[int, int], float] = {}
        self.bags: dict[int, Mailbag] = {}

    def send(self, letter: Letter) -> None:
        """Puts a message on its way."""
        self.ledger.ended.add(Part(letter, outgoing=False))
        self._carry(letter.sender, letter.receiver, lambda: self.bags[letter.receiver].arrive(letter))

    def take(self, letter: Letter) -> None:
        """Lets the sender of a large message know that the receiver has taken it."""
        if letter.large:
            self.ledger.ended.add(Part(letter, outgoing=True))
            self._carry(letter.receiver, letter.sender, lambda: self.bags[letter.sender].note_taken(letter))

    def _carry(self, sender: int, receiver: int, arrive: Callable[[], None]) -> None:
        mean = _LATE if self._rng.random() < _LATENESS else _USUAL
        time = self._agenda.now + self._rng.expovariate(1 / mean)
        time = self._last[sender, receiver] = max(time, self._last.get((sender, receiver), 0.0))
        self._agenda.at(time, arrive)


class Mailbag:
    """What one rank sends and receives."""

    def __init__(self, rank: int, routes: Routes, *, wake: Callable[[], None]) -> None:
        """Starts with nothing under way; ``wake`` has the rank look when a message has come."""
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
        """The receives for which nothing has come."""
        return [*self._wanted.values()]

    @property
    def offered(self) -> list[Any]:
        """The sends of large messages that have not been taken."""
        return [*self._offered.values()]

    @property
    def letters(self) -> list[Any]:
        """All of these."""
        return [*self.wanted, *self.offered]

    @property
    def unclaimed(self) -> list[tuple[int, int]]:
        """The large messages that have come, and for which no receive has begun, by sender and number."""
        return sorted((letter.sender, number) for letter, number in self._early.items() if letter.large)

    @property
    def sent(self) -> list[tuple[int, int]]:
        """How many messages this rank has sent, by receiver."""
        return sorted(self._sent.items())

    def heard(self, sender: int) -> int:
        """How many messages of a rank have come."""
        return self._heard[sender]

    def send(self, letter: Letter, receipt: Receipt | None) -> None:
        """Sends; a large message has a receipt."""
        self._sent[letter.receiver] += 1
        self._routes.send(letter)
        if receipt is not None:
            receipt.number = self._sent[letter.receiver]
            self._offered[letter] = receipt
            self._end()

    def receive(self, receipt: Receipt) -> None:
        """Begins to receive."""
        letter = receipt.turn.letter
        if letter in self._early:
            del self._early[letter]
            self._routes.take(letter)
            receipt.resolve(None)
        else:
            self._wanted[letter] = receipt
            self._end()

    def arrive(self, letter: Letter) -> None:
        """Gets a message, which the rank has yet to look at."""
        self._come.append(letter)
        self._wake()

    def note_taken(self, letter: Letter) -> None:
        """Gets word that the receiver has taken a message."""
        self._taken.append(letter)
        self._wake()

    def deliver(self) -> bool:
        """Looks at what has come; says whether there was anything."""
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
        """Drops receives for which nothing has come, or the send of a number, and returns them."""
        where = self._offered if number else self._wanted
        found = [
            letter for letter, each in where.items() if (each.peer, each.name, each.number) == (peer, name, number)
        ]
        return [where.pop(letter) for letter in found]

    @property
    def traffic(self) -> Traffic | None:
        """What ranks that exchange messages with this one have to know when it leaves."""
        if not (self._sent or self._heard):
            return None
        early = sorted((letter.sender, number) for letter, number in self._early.items())
        return Traffic(tuple(self.sent), tuple(sorted(self._heard.items())), tuple(early))

    def old(self, now: float) -> tuple[int, ...]:
        """The ranks at the other ends of what has been under way for a second, once each."""
        found = {each.peer for each in self.letters if each.submitted <= now - 1.0} - self._asked
        self._asked |= found
        return tuple(sorted(found))

    def follow(self, plan: Plan, member: Member) -> bool:
        """Fails what a plan says that will not be sent or taken; says whether the script's wait may be over by that."""
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
        """Fails what ranks that have left take no part in."""
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
        """Forgets a message that has failed where it comes from."""
        for letter in [each for each, count in self._early.items() if (each.sender, count) == (sender, number)]:
            del self._early[letter]
            self._routes.ledger.ended.discard(Part(letter, outgoing=False))

    def clear(self) -> list[Receipt]:
        """Drops all."""
        found = self.letters
        self._wanted, self._offered = {}, {}
        return found
