"""One rank's end of a tree: the hub of a star below it, and a member of the star above it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordd.control.peer_process import Identity
from coordd.control.zeromq import Address, ZmqControl, interface_for
from coordd.errors import StartError
from coordd.negotiation.channel import Control, Lost
from coordd.negotiation.tree import NOBODY, Post
from coordd.ops.messages import Message

__all__ = ["Branch", "join"]


class Branch:
    """Combines the two ends into one control channel."""

    def __init__(self, parent: int, above: Control, below: Control) -> None:
        self._parent = parent
        self._above = above
        self._below = below
        self.descriptors: Sequence[int] = (*above.descriptors, *below.descriptors)

    def send(self, rank: int, message: Message) -> None:
        """Sends to the parent or to a child."""
        (self._above if rank == self._parent else self._below).send(rank, message)

    def receive(self) -> list[tuple[int, Message | Lost]]:
        """Returns received messages, those from above first."""
        return self._above.receive() + self._below.receive()

    def ready(self) -> bool:
        """Returns whether something may have arrived without a descriptor becoming readable."""
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
        hosts: for every rank a name, equal for ranks that reach each other by loopback.
        interface: where to listen, from the user; empty to choose.
        heartbeat_seconds: after how much silence a neighbour counts as dead.

    Raises:
        StartError: there is no such interface, or the parent does not listen, because it computes another tree.
        PeerError: this holds on another rank.
    """
    pids, private = _neighbours(post, gather, hosts=hosts)
    with contextlib.ExitStack() as undo:
        below = ZmqControl(post.rank, hub=post.rank, heartbeat_seconds=heartbeat_seconds) if post.children else None
        mine = None
        if below is not None:
            undo.callback(below.close)
            mine = _listen(below, post, hosts=hosts, interface=interface, private=private and not interface)
            for child in post.children:
                _watch(below, child, pids)
        addresses = gather(mine)
        if post.parent == NOBODY and below is not None:
            undo.pop_all()
            return below
        if addresses[post.parent] is None:
            text = f"rank {post.parent} does not listen to rank {post.rank}: set fan_in alike on all ranks"
            raise StartError(text)
        above = ZmqControl(post.rank, hub=post.parent, heartbeat_seconds=heartbeat_seconds)
        undo.callback(above.close)
        above.connect(addresses[post.parent])
        _watch(above, post.parent, pids)
        undo.pop_all()
    return above if below is None else Branch(post.parent, above, below)


def _listen(below: ZmqControl, post: Post, *, hosts: Sequence[str], interface: str, private: bool) -> Address:
    """Listens where only processes of this user can connect, if all children are there; else on TCP."""
    if private:
        with contextlib.suppress(OSError):
            return below.listen_here(children=len(post.children))
    where = interface_for([hosts[rank] for rank in (post.rank, *post.children)], interface)
    return below.listen(where, children=len(post.children))


def _watch(control: ZmqControl, rank: int, pids: Mapping[int, int]) -> None:
    if rank in pids:
        control.watch(rank, pids[rank])


def _neighbours(post: Post, gather: Callable[[Any], list[Any]], *, hosts: Sequence[str]) -> tuple[dict[int, int], bool]:
    """Finds the processes of this machine among parent and children, and whether all children see this one."""
    read, write = os.pipe()
    try:
        found: list[Identity] = gather(Identity.of(read))
        near = [rank for rank in (post.parent, *post.children) if rank != NOBODY and hosts[rank] == hosts[post.rank]]
        pids = {rank: found[rank].pid for rank in near if found[rank].here}
        seen: list[bool] = gather(post.parent in pids)
    finally:
        os.close(read)
        os.close(write)
    return pids, all(seen[child] for child in post.children)
