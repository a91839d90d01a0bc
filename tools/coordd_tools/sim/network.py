"""The control channel's network: a star or tree around rank 0 with delays, and with messages in order on each link."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from random import Random

from coordd.negotiation.channel import LOST, Lost
from coordd.negotiation.wire import decode, encode
from coordd.ops.messages import Message
from coordd_tools.sim.agenda import Agenda

__all__ = ["Network"]

_USUAL, _SPIKE = 2e-4, 2e-2
_SPIKES = 0.05
_NEVER = float("inf")

Link = tuple[int, int]


class Network:
    """Carries encoded messages between ranks; messages of different links overtake each other."""

    def __init__(
        self, agenda: Agenda, rng: Random, *, spikes: bool, deliver: Callable[[int, int, Message | Lost], None]
    ) -> None:
        """Starts with all links open.

        Args:
            agenda: the clock.
            rng: the random generator.
            spikes: whether some messages take a hundred times as long as usual.
            deliver: called with the receiver, the sender and the message.
        """
        self.carried = 0
        self._agenda = agenda
        self._rng = rng
        self._spikes = _SPIKES if spikes else 0.0
        self._deliver = deliver
        self._last: dict[Link, float] = {}
        self._cut: dict[Link, float] = {}

    def send(self, sender: int, receiver: int, message: Message) -> None:
        """Sends a message; a rank whose link is closed sends nothing."""
        link = (sender, receiver)
        if link in self._cut:
            return
        self.carried += 1
        data = encode(message)
        time = self._arrival(link)
        self._agenda.at(time, partial(self._arrive, link, time, decode(data)))

    def close(self, rank: int, neighbours: Iterable[int], *, crashed: bool) -> None:
        """Closes all links of a rank; after a crash, some messages in flight are lost."""
        for peer in neighbours:
            link = (rank, peer)
            if link in self._cut:
                continue
            last = self._arrival(link)
            self._cut[link] = self._rng.uniform(self._agenda.now, last) if crashed else last
            self._agenda.at(last, partial(self._arrive, link, last, LOST))

    def _arrival(self, link: Link) -> float:
        mean = _SPIKE if self._rng.random() < self._spikes else _USUAL
        time = max(self._last.get(link, 0.0), self._agenda.now + self._rng.expovariate(1 / mean))
        self._last[link] = time
        return time

    def _arrive(self, link: Link, time: float, message: Message | Lost) -> None:
        if isinstance(message, Lost) or time <= self._cut.get(link, _NEVER):
            self._deliver(link[1], link[0], message)
