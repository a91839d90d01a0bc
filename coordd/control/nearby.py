"""The control channel of a host: messages between neighbours go through common memory, the others over the network.

A message for which a ring has no room takes the network, too, and so does the first one to the parent, who learns from
it whose connection that is. Frames in a ring say how many messages of their sender have taken the network before them.
The network delivers in order, and what it delivers was sent after what was put into the ring before; so the order of
sending is found again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coordd.control import ring
from coordd.control.protocol import LOST, Control, Lost, read
from coordd.control.ring import RingError, RingReader, RingWriter
from coordd.messages import Message
from coordd.transport.board import Board
from coordd.transport.commons import Commons
from coordd.tree import NOBODY, Post
from coordd.wire import Scribe

__all__ = ["Edge", "Nearby", "join"]

log = logging.getLogger("coordd")

_COUNT = 8
_PAUSE = 100e-6
Arrived = list[tuple[int, Message | Lost]]


class Edge:
    """The way to one neighbour and back."""

    def __init__(self, outward: RingWriter, inward: RingReader, *, upward: bool = True) -> None:
        """Takes the two rings; ``upward`` is whether the neighbour is the parent, to whom the network introduces us."""
        self._outward = outward
        self._inward = inward
        self._upward = upward
        self._sent = 0
        self._come = 0
        self._held: bytes | None = None

    @property
    def news(self) -> bool:
        """Whether something was put into this rank's ring that need not wait for the network."""
        return self._held is None and self._inward.news

    def put(self, data: bytes) -> bool:
        """Puts a message into the neighbour's ring; False if it is to take the network, which is counted."""
        introduced = self._sent > 0 or not self._upward
        if introduced and self._outward.put(self._sent.to_bytes(_COUNT, "little") + data):
            return True
        self._sent += 1
        return False

    def pass_on(self) -> None:
        """Notes that a message has taken the network."""
        self._come += 1

    def take(self) -> Iterator[bytes]:
        """Takes out what the neighbour has sent before anything that is still to come over the network.

        Raises:
            RingError: this rank's ring is broken.
        """
        while (frame := self._held or self._inward.take()) is not None:
            self._held = frame if int.from_bytes(frame[:_COUNT], "little") > self._come else None
            if self._held is not None:
                return
            yield frame[_COUNT:]


class Nearby:
    """One rank's end."""

    def __init__(
        self, far: Control, edges: Mapping[int, Edge], boards: Mapping[int, Board], *, pause: float = 0.0
    ) -> None:
        """Puts the two ways together.

        Args:
            far: the network.
            edges: the neighbours with whom this rank speaks through memory.
            boards: theirs, for their bells.
            pause: seconds between two looks at the network, unless it has brought something: each look is a system
                call, and where all neighbours are near, hardly anything comes that way.
        """
        self._far = far
        self._edges = dict(edges)
        self._boards = boards
        self._scribe = Scribe()
        self._pause, self._next = pause, -math.inf
        self.descriptors = far.descriptors

    def send(self, rank: int, message: Message) -> None:
        """Puts a message into a ring, or hands it to the network."""
        edge = self._edges.get(rank)
        if edge is not None and edge.put(self._scribe.encode(message)):
            self._boards[rank].call()
        else:
            self._far.send(rank, message)

    def receive(self) -> Arrived:
        """Takes what has arrived; what a rank had sent before it was lost comes before its loss."""
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
        """Says whether something may have arrived of which no descriptor tells."""
        return any(edge.news for edge in self._edges.values()) or self._far.ready()

    def close(self) -> None:
        """Leaves; what lies in the rings stays there for their readers."""
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
            found.append((rank, LOST))  # whatever it has said, it is not heard any more
        return found


def join(far: Control, place: Post, gather: Callable[[Any], list[Any]], commons: Commons) -> Control:
    """Connects a rank with those of its parent and children that are on its host; all ranks call it.

    Args:
        far: the network, which reaches all of them.
        place: the rank's place in the tree.
        gather: exchanges a value with all ranks.
        commons: the rank's host.

    Returns:
        the network itself if there are ranks anywhere that cannot see their neighbours' rings: all go the same way.
    """
    near = [rank for rank in (place.parent, *place.children) if rank in commons.boards]
    rings = ring.join(place.rank, near, commons.boards, gather)
    if rings is None:
        return far
    edges = {rank: Edge(*pair, upward=rank == place.parent) for rank, pair in rings.items()}
    all_near = len(near) == len(place.children) + (place.parent != NOBODY)
    return Nearby(far, edges, commons.boards, pause=_PAUSE if all_near else 0.0)
