"""Sends and receives of simulated ranks: a message comes some time after it was sent, those of a pair in order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from coordd.errors import PeerError, is_deadlock
from coordd.handles import Handle
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.ledger import Ledger, demand

__all__ = ["Letter", "Mailbag", "Receipt", "Routes"]

_USUAL, _LATE = 1e-3, 3.0
_LATENESS = 0.2
"""So many messages are under way for longer than it takes a rank to say that it is blocked."""


@dataclass(frozen=True, eq=False)
class Letter:
    """A message from one rank to another, which has a name of its own."""

    name: str
    sender: int
    receiver: int

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that it concerns."""
        return (self.sender, self.receiver)


class Receipt(Handle[object]):
    """A receive of one rank."""

    __slots__ = ("_ledger", "handle", "peer", "rank", "turn")

    def __init__(self, ledger: Ledger, turn: Letter) -> None:
        super().__init__(turn.name)
        self.name = turn.name
        self.peer = turn.sender
        self.handle = self
        self.rank = turn.receiver
        self.turn = turn
        self._ledger = ledger
        ledger.receipts.append(self)

    @property
    def failed(self) -> bool:
        """Whether it has ended badly."""
        return self._error is not None

    def resolve(self, result: object) -> None:
        """Ends well: it has been sent."""
        demand(self.turn in self._ledger.sent, f"{self!r} came, but was not sent")
        super().resolve(result)

    def fail(self, error: BaseException) -> None:
        """Ends badly: ranks have waited for each other, or one has failed."""
        true = is_deadlock(error) or (isinstance(error, PeerError) and self._ledger.failed)
        demand(true, f"{self!r} failed with {error!r}")
        super().fail(error)


class Routes:
    """Carries messages between ranks."""

    def __init__(self, agenda: Agenda, rng: Random) -> None:
        self._agenda = agenda
        self._rng = rng
        self._last: dict[tuple[int, ...], float] = {}
        self.bags: dict[int, Mailbag] = {}

    def send(self, letter: Letter) -> None:
        """Puts a message on its way."""
        mean = _LATE if self._rng.random() < _LATENESS else _USUAL
        time = self._agenda.now + self._rng.expovariate(1 / mean)
        time = self._last[letter.members] = max(time, self._last.get(letter.members, 0.0))
        self._agenda.at(time, lambda: self.bags[letter.receiver].arrive(letter))


class Mailbag:
    """What one rank sends and receives."""

    def __init__(self, rank: int, routes: Routes, *, wake: Callable[[], None]) -> None:
        """Starts with nothing under way; ``wake`` has the rank look when a message has come."""
        self._routes = routes
        self._wake = wake
        self._come: deque[Letter] = deque()
        self._early: set[Letter] = set()
        self._wanted: dict[Letter, Receipt] = {}
        self.sent: Counter[int] = Counter()
        self.heard: Counter[int] = Counter()
        routes.bags[rank] = self

    def __contains__(self, receipt: object) -> bool:
        return receipt in self._wanted.values()

    @property
    def wanted(self) -> list[Any]:
        """The receives for which nothing has come."""
        return [*self._wanted.values()]

    letters = wanted

    def send(self, letter: Letter) -> None:
        """Sends."""
        self.sent[letter.receiver] += 1
        self._routes.send(letter)

    def receive(self, receipt: Receipt) -> None:
        """Begins to receive."""
        if receipt.turn in self._early:
            self._early.remove(receipt.turn)
            receipt.resolve(None)
        else:
            self._wanted[receipt.turn] = receipt

    def arrive(self, letter: Letter) -> None:
        """Gets a message, which the rank has yet to look at."""
        self._come.append(letter)
        self._wake()

    def deliver(self) -> bool:
        """Looks at what has come; says whether there was anything."""
        moved = bool(self._come)
        while self._come:
            letter = self._come.popleft()
            self.heard[letter.sender] += 1
            if (receipt := self._wanted.pop(letter, None)) is None:
                self._early.add(letter)
            else:
                receipt.resolve(None)
        return moved

    def give_up(self, sender: int, name: str) -> list[Receipt]:
        """Drops receives for which nothing has come, and returns them."""
        found = [letter for letter in self._wanted if (letter.sender, letter.name) == (sender, name)]
        return [self._wanted.pop(letter) for letter in found]

    def clear(self) -> list[Receipt]:
        """Drops all."""
        wanted, self._wanted = [*self._wanted.values()], {}
        return wanted
