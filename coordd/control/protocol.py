"""What a control channel must offer: a star or a tree around rank 0 that works while data hangs or a rank is dead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from coordd.messages import Message
from coordd.wire import WireError, decode

__all__ = ["LOST", "Control", "Lost", "read"]

log = logging.getLogger("coordd")


class Lost:
    """The connection to a rank has closed."""

    __slots__ = ()


LOST = Lost()


class Control(Protocol):
    """One rank's end. It reaches those who report to this rank, and the one that this rank reports to."""

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors that become readable when something arrives."""
        ...

    def send(self, rank: int, message: Message) -> None:
        """Sends to a rank; never blocks; what cannot be delivered any more is dropped."""
        ...

    def receive(self) -> list[tuple[int, Message | Lost]]:
        """Returns what has arrived, with its senders; never blocks."""
        ...

    def ready(self) -> bool:
        """Says whether `receive` may return something of which no descriptor tells; asked before a sleep on them."""
        ...

    def close(self) -> None:
        """Leaves, after what was sent has been handed to the network."""
        ...


def read(sender: int, data: bytes) -> list[tuple[int, Message]]:
    """Reads a message; bytes that are none are logged and dropped."""
    try:
        return [(sender, decode(data))]
    except WireError as error:
        log.warning("dropped a control message from rank %d: %s", sender, error)
        return []
