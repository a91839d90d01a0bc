"""One rank's end of a tree: the hub of a star below it, and a member of the star above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordd.control.protocol import Control, Lost
from coordd.control.zeromq import ZmqControl, interface_for
from coordd.errors import StartError
from coordd.messages import Message
from coordd.tree import NOBODY, Post

__all__ = ["Branch", "join"]


class Branch:
    """The two ends as one."""

    def __init__(self, parent: int, above: Control, below: Control) -> None:
        self._parent = parent
        self._above = above
        self._below = below
        self.descriptors: Sequence[int] = (*above.descriptors, *below.descriptors)

    def send(self, rank: int, message: Message) -> None:
        """Sends to the parent or to a child."""
        (self._above if rank == self._parent else self._below).send(rank, message)

    def receive(self) -> list[tuple[int, Message | Lost]]:
        """Takes what has arrived, from above first."""
        return self._above.receive() + self._below.receive()

    def ready(self) -> bool:
        """Says whether something may have arrived."""
        return self._above.ready() or self._below.ready()

    def close(self) -> None:
        """Leaves both stars."""
        self._below.close()
        self._above.close()


def join(
    post: Post, gather: Callable[[Any], list[Any]], *, hosts: Sequence[str], interface: str, heartbeat_seconds: float
) -> Control:
    """Connects a rank with its parent and its children; the addresses travel over the data plane.

    Args:
        post: the rank's place.
        gather: exchanges a value with all ranks.
        hosts: the host of every rank.
        interface: where to listen, from the user; empty to choose.
        heartbeat_seconds: after how much silence a neighbour counts as dead.

    Raises:
        StartError: there is no such interface, or the parent is not one on its own account.
    """
    below = ZmqControl(post.rank, hub=post.rank, heartbeat_seconds=heartbeat_seconds) if post.children else None
    mine = None
    if below is not None:
        mine = below.listen(interface_for([hosts[rank] for rank in (post.rank, *post.children)], interface))
    addresses = gather(mine)
    if post.parent == NOBODY and below is not None:
        return below
    if addresses[post.parent] is None:
        text = f"rank {post.parent} does not listen to rank {post.rank}: set fan_in alike on all ranks"
        raise StartError(text)
    above = ZmqControl(post.rank, hub=post.parent, heartbeat_seconds=heartbeat_seconds)
    above.connect(addresses[post.parent])
    return above if below is None else Branch(post.parent, above, below)
