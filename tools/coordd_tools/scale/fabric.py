"""The network: each message takes the latency of a hop; a rank's bytes are serialised on its way out and in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordd_tools.scale.setting import Setting
from coordd_tools.sim.agenda import Agenda

__all__ = ["Account", "Fabric"]


@dataclass
class Account:
    """One rank's messages, bytes and busy time.

    Attributes:
        heard: messages received.
        said: messages sent.
        heard_bytes: bytes received.
        said_bytes: bytes sent.
        busy: seconds of the rank's time.
    """

    heard: int = 0
    said: int = 0
    heard_bytes: int = 0
    said_bytes: int = 0
    busy: float = 0.0

    @property
    def messages(self) -> int:
        """Messages received and sent."""
        return self.heard + self.said

    @property
    def bytes(self) -> int:
        """Bytes received and sent."""
        return self.heard_bytes + self.said_bytes


class Fabric:
    """Carries bytes between ranks, and keeps their accounts."""

    def __init__(self, setting: Setting, agenda: Agenda, deliver: Callable[[int, int, bytes], None]) -> None:
        """Starts with an empty network.

        Args:
            setting: latency and bandwidth.
            agenda: the clock.
            deliver: called with receiver, sender and bytes.
        """
        self._setting = setting
        self._agenda = agenda
        self._deliver = deliver
        self._out = [0.0] * setting.ranks
        self._in = [0.0] * setting.ranks
        self.accounts = [Account() for _ in range(setting.ranks)]

    def send(self, sender: int, receiver: int, data: bytes, *, at: float) -> None:
        """Sends bytes at a time."""
        seconds = len(data) / self._setting.bandwidth
        sent = self._out[sender] = max(at, self._out[sender]) + seconds
        come = self._in[receiver] = max(sent + self._setting.latency, self._in[receiver] + seconds)
        self.accounts[sender].said += 1
        self.accounts[sender].said_bytes += len(data)
        self.accounts[receiver].heard += 1
        self.accounts[receiver].heard_bytes += len(data)
        self._agenda.at(come, lambda: self._deliver(receiver, sender, data))

    def settle(self) -> list[Account]:
        """Returns the accounts so far and starts new ones."""
        closed, self.accounts = self.accounts, [Account() for _ in self.accounts]
        return closed
