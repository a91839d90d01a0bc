"""One rank's daemon in virtual time: receives messages, sends replies, and is busy as long as that took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from coordd.negotiation import wire
from coordd.negotiation.aggregator import Hub
from coordd.negotiation.coordinator import Outgoing
from coordd.negotiation.tree import Post
from coordd.ops.messages import Hello, Message, Plan
from coordd_tools.scale.crowd import Crowd
from coordd_tools.scale.fabric import Fabric
from coordd_tools.sim.agenda import Agenda

__all__ = ["Node", "Readings"]

_REMEMBERED = 8


class Readings:
    """Decoded messages by their bytes: ranks without a hub share one decoding, whose time is charged to each."""

    def __init__(self) -> None:
        self._read: dict[bytes, tuple[Message, float]] = {}

    def once(self, data: bytes) -> tuple[Message, float]:
        """Decodes bytes, or returns the message and the CPU seconds of the first decoding."""
        if data not in self._read:
            self._read[data] = self.anew(data)
        return self._read[data]

    def anew(self, data: bytes) -> tuple[Message, float]:
        """Decodes bytes anew; equal messages share one object, to save memory with ten thousand ranks."""
        started = time.thread_time()
        message = wire.decode(data)
        seconds = time.thread_time() - started
        return self._read.setdefault(data, (message, seconds))[0], seconds


def _nothing(_message: Message, _at: float) -> None:
    """Ignores a message."""


class Node:
    """The daemon of one rank, which may share its `Member` with a crowd."""

    def __init__(  # noqa: PLR0913 - what is around it
        self,
        post: Post,
        hub: Hub | None,
        crowd: Crowd,
        *,
        agenda: Agenda,
        fabric: Fabric,
        readings: Readings,
        postage: float,
    ) -> None:
        self.post = post
        self.seen = 0
        self.crowd = crowd
        self.told: Callable[[Message, float], None] = _nothing
        self._hub = hub
        self._agenda = agenda
        self._fabric = fabric
        self._readings = readings
        self._postage = postage
        self._mail: list[tuple[int, bytes]] = []
        self._words: list[Callable[[], tuple[Message, float]]] = []
        self._known: list[bytes] = []
        self._free = 0.0
        self._due = float("inf")

    def arrive(self, sender: int, data: bytes) -> None:
        """Receives a message."""
        self._mail.append((sender, data))
        self._wake(self._agenda.now)

    def greet(self, hello: Hello) -> None:
        """Sends a hello."""
        self._words.append(lambda: (hello, 0.0))
        self._wake(self._agenda.now)

    def report(self, step: int, cut: int) -> None:
        """Announces the tensors of one report."""
        self._words.append(lambda: self.crowd.announce(step, cut, self.seen))
        self._wake(self._agenda.now)

    def _wake(self, time: float) -> None:
        """Schedules a cycle for the time when this rank is free."""
        due = max(time, self._free)
        if due < self._due:
            self._due = due
            self._agenda.at(due, lambda: self._cycle(due))

    def _cycle(self, due: float) -> None:
        if due != self._due:
            return
        self._due = float("inf")
        words, self._words = self._words, []
        mail, self._mail = self._mail, []
        own: list[tuple[Message, float]] = [word() for word in words]
        spent = sum(seconds for _, seconds in own) + self._postage * len(mail)
        if self._hub is None:
            self._plainly(due + spent, own, mail)
        else:
            self._as_hub(due, spent, self._hub, own, mail)

    def _plainly(self, now: float, own: Iterable[tuple[Message, float]], mail: Iterable[tuple[int, bytes]]) -> None:
        """Runs a cycle of a rank that has no children."""
        for message, _ in own:
            now = self._send([(self.post.parent, message)], now)
        for _, data in mail:
            message, seconds = self._readings.once(data)
            now = self._obey(message, now + seconds)
        self._end(now)

    def _as_hub(
        self, now: float, spent: float, hub: Hub, own: list[tuple[Message, float]], mail: list[tuple[int, bytes]]
    ) -> None:
        """Runs a cycle of a rank with a real hub, whose CPU time is measured."""
        self._recall(data for _, data in mail)
        read = []
        for sender, data in mail:
            message, seconds = self._readings.anew(data)
            read.append((sender, message))
            spent += seconds
        started = time.thread_time()
        for message, _ in own:
            hub.hear(self.post.rank, message, now=now)
        for sender, message in read:
            hub.hear(sender, message, now=now)
        out = hub.turn(now)
        spent += time.thread_time() - started
        done = self._send([(rank, message) for rank, message in out if rank != self.post.rank], now + spent)
        for rank, message in out:
            if rank == self.post.rank:
                done = self._obey(message, done)
        if hub.deadline is not None:
            self._agenda.at(max(hub.deadline, done), lambda: self._wake(self._agenda.now))
        self._end(done)

    def _recall(self, mail: Iterable[bytes]) -> None:
        """Restores the wire format's cache to the messages that this rank decoded recently, and no other rank's."""
        wire.forget()
        for data in mail:
            if data in self._known:
                wire.decode(data)
            else:
                self._known = [*self._known, data][-_REMEMBERED:]

    def _send(self, out: Outgoing, now: float) -> float:
        """Encodes each message once and sends it; returns the time when that is done."""
        last: Message | None = None
        data = b""
        for rank, message in out:
            started = time.thread_time()
            if message is not last:
                last, data = message, wire.encode(message)
            now += time.thread_time() - started + self._postage
            self._fabric.send(self.post.rank, rank, data, at=now)
        return now

    def _obey(self, message: Message, now: float) -> float:
        """Carries out a received message; returns the time when that is done."""
        self.told(message, now)
        if isinstance(message, Plan):
            self.seen = message.sequence
            now += self.crowd.follow(message)
        return now

    def _end(self, now: float) -> None:
        self._fabric.accounts[self.post.rank].busy += now - self._agenda.now
        self._free = now
        if self._mail or self._words:
            self._wake(now)
