"""Interface of a data plane: non-blocking messages between ranks, nothing more.

Collectives, pipelines and the mailbox are built on these four methods, so a new data plane is about a hundred lines.
One rule: no method of a lane ever blocks, and all are called by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["ANY", "Lane", "Ticket", "Transport"]

ANY = -1
"""As a source: any rank."""

Ticket = Any
"""One message in flight; opaque."""


class Lane(Protocol):
    """A space of messages that is separate from other lanes.

    Messages of equal source, destination and tag arrive in the order in which they were sent.
    """

    @property
    def tags(self) -> int:
        """Number of tags; they run from 0 to this number, exclusive."""
        ...

    def isend(self, array: np.ndarray, destination: int, tag: int) -> Ticket:
        """Starts the send of a contiguous array, which must not change until the ticket is done."""
        ...

    def irecv(self, array: np.ndarray, source: int, tag: int) -> Ticket:
        """Starts a receive into a contiguous array, which must be at least as large as the message."""
        ...

    def done(self, tickets: Sequence[Ticket]) -> bool:
        """Drives the network; returns whether all these messages are complete.

        Raises:
            Exception: the network failed; nothing on it can be trusted any more.
        """
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Withdraws a receive that no send will match."""
        ...


class Transport(Protocol):
    """A data plane between all ranks of a world.

    ``collective`` carries negotiated and ordered operations, ``matched`` carries sends and receives.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def collective(self) -> Lane:
        """The lane for collectives."""
        ...

    @property
    def matched(self) -> Lane:
        """The lane for sends and receives."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Exchanges one small picklable value with all ranks; blocks; used only while ranks connect."""
        ...

    def close(self, *, failed: bool) -> None:
        """Closes the transport in step with the other ranks or, after a failure, without waiting for any rank."""
        ...
