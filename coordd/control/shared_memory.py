"""Control channel of a host: messages between neighbours use shared memory, all others the network.

A message that does not fit into a ring uses the network, and so does the first message to the parent, because the
parent learns from it which connection belongs to this rank. Each frame in a ring carries the number of messages that
its sender has sent over the network before it. The network delivers in order, so the receiver can restore the order of
sending from this count.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coordd.negotiation.channel import LOST, Control, Lost, read
from coordd.negotiation.tree import NOBODY, Post
from coordd.negotiation.wire import Scribe
from coordd.ops.messages import Message
from coordd.transport.shared_memory import ring_buffer
from coordd.transport.shared_memory.board import Board
from coordd.transport.shared_memory.host_memory import Commons
from coordd.transport.shared_memory.ring_buffer import RingError, RingReader, RingWriter

__all__ = ["Edge", "Nearby", "join"]

log = logging.getLogger("coordd")

_COUNT = 8
_PAUSE = 100e-6
Arrived = list[tuple[int, Message | Lost]]


class Edge:
    """Both directions of the connection to one neighbour."""

    def __init__(self, outward: RingWriter, inward: RingReader, *, upward: bool = True) -> None:
        """Stores the two rings.

        Args:
            outward: the ring from this rank to the neighbour.
            inward: the ring from the neighbour to this rank.
            upward: whether the neighbour is the parent; the first message to the parent always uses the network.
        """
        self._outward = outward
        self._inward = inward
        self._upward = upward
        self._sent = 0
        self._come = 0
        self._held: bytes | None = None

    @property
    def news(self) -> bool:
        """Whether this rank's ring holds a message that need not wait for the network."""
        return self._held is None and self._inward.news

    def put(self, data: bytes) -> bool:
        """Puts a message into the neighbour's ring; returns False, and counts it, if it must use the network."""
        introduced = self._sent > 0 or not self._upward
        if introduced and self._outward.put(self._sent.to_bytes(_COUNT, "little") + data):
            return True
        self._sent += 1
        return False

    def pass_on(self) -> None:
        """Counts a message that was received over the network."""
        self._come += 1

    def take(self) -> Iterator[bytes]:
        """Yields the messages that the neighbour sent before any message still to arrive over the network.

        Raises:
            RingError: this rank's ring is corrupt.
        """
        while (frame := self._held or self._inward.take()) is not None:
            self._held = frame if int.from_bytes(frame[:_COUNT], "little") > self._come else None
            if self._held is not None:
                return
            yield frame[_COUNT:]


class Nearby:
    """One rank's end of the control channel."""

    def __init__(
        self, far: Control, edges: Mapping[int, Edge], boards: Mapping[int, Board], *, pause: float = 0.0
    ) -> None:
        """Combines the network with the rings.

        Args:
            far: the network.
            edges: the neighbours that this rank reaches through shared memory.
            boards: the boards of these neighbours, used to wake them.
            pause: seconds between two polls of the network after an empty poll: each poll is a system call, and where
                all neighbours are on this host, few messages use the network.
        """
        self._far = far
        self._edges = dict(edges)
        self._boards = boards
        self._scribe = Scribe()
        self._pause, self._next = pause, -math.inf
        self.descriptors = far.descriptors

    def send(self, rank: int, message: Message) -> None:
        """Puts a message into a ring, or sends it over the network."""
        edge = self._edges.get(rank)
        if edge is not None and edge.put(self._scribe.encode(message)):
            self._boards[rank].call()
        else:
            self._far.send(rank, message)

    def receive(self) -> Arrived:
        """Returns the received messages; the messages that a lost rank sent come before its `LOST`."""
        found: Arrived = []
        for sender, message in self._receive_far():
            found += self._take(sender)
            found.append((sender, message))
            if isinstance(message, Lost):
                self._edges.pop(sender, None)
            elif sender in self._edges:
                self._edges[sender].pass_on()
                found += self._take(sender)
        for rank in [rank for rank, edge in self._edges.items() if edge.news]:
            found += self._take(rank)
        return found

    def ready(self) -> bool:
        """Returns whether a message may have arrived that no descriptor signals."""
        return any(edge.news for edge in self._edges.values()) or self._far.ready()

    def close(self) -> None:
        """Closes the network; frames in the rings stay there for their readers."""
        self._far.close()

    def _receive_far(self) -> Arrived:
        if self._pause:
            now = time.monotonic()
            if now < self._next:
                return []
            self._next = now + self._pause
        found = self._far.receive()
        if found:
            self._next = -math.inf
        return found

    def _take(self, rank: int) -> Arrived:
        if rank not in self._edges:
            return []
        found: Arrived = []
        try:
            for data in self._edges[rank].take():
                found += read(rank, data)
        except RingError as error:
            log.error("cannot read what rank %d tells in common memory: %s", rank, error)  # noqa: TRY400 - no bug of ours
            del self._edges[rank]
            found.append((rank, LOST))  # its messages are no longer received
        return found


def join(far: Control, place: Post, gather: Callable[[Any], list[Any]], commons: Commons) -> Control:
    """Connects a rank with its parent and those children that are on its host; all ranks must call it.

    Args:
        far: the network, which reaches all of them.
        place: the rank's place in the tree.
        gather: exchanges a value with all ranks.
        commons: the shared memory of the rank's host.

    Returns:
        A `Nearby`, or ``far`` itself if any rank of the job cannot map its neighbours' rings: all ranks make the same
        choice.
    """
    near = [rank for rank in (place.parent, *place.children) if rank in commons.boards]
    rings = ring_buffer.join(place.rank, near, commons.boards, gather)
    if rings is None:
        return far
    edges = {rank: Edge(*pair, upward=rank == place.parent) for rank, pair in rings.items()}
    all_near = len(near) == len(place.children) + (place.parent != NOBODY)
    return Nearby(far, edges, commons.boards, pause=_PAUSE if all_near else 0.0)
