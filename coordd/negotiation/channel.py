"""Interface of a control channel: a star or a tree around rank 0 that works while data hangs or a rank is dead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from coordd.negotiation.wire import WireError, decode
from coordd.ops.messages import Message

__all__ = ["LOST", "Control", "Lost", "read"]

log = logging.getLogger("coordd")


class Lost:
    """Marker: the connection to a rank has closed."""

    __slots__ = ()


LOST = Lost()


class Control(Protocol):
    """One rank's end. It reaches the ranks that report to this rank, and the rank that this rank reports to."""

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors that become readable when a message arrives."""
        ...

    def send(self, rank: int, message: Message) -> None:
        """Sends a message to a rank; never blocks; a message that can no longer be delivered is dropped."""
        ...

    def receive(self) -> list[tuple[int, Message | Lost]]:
        """Returns the received messages with their senders; never blocks."""
        ...

    def ready(self) -> bool:
        """Returns whether `receive` may return a message that no descriptor signals; asked before a sleep on them."""
        ...

    def close(self) -> None:
        """Closes this end after all sent messages have been handed to the network."""
        ...


def read(sender: int, data: bytes) -> list[tuple[int, Message]]:
    """Decodes a message; invalid bytes are logged and dropped."""
    try:
        return [(sender, decode(data))]
    except WireError as error:
        log.warning("dropped a control message from rank %d: %s", sender, error)
        return []
