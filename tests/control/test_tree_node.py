"""A tree of control channels over real sockets on loopback: ranks 0 and 1 on one host, 2 and 3 on another."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from coordd.control.tree_node import Branch, join
from coordd.control.zeromq import ZmqControl
from coordd.daemon.wakeup import Bell
from coordd.errors import StartError
from coordd.negotiation.channel import LOST
from coordd.negotiation.tree import tree
from coordd.ops.messages import Goodbye, Inquiry, Report
from coordd.transport.local import LocalWorld

DEADLINE = 10.0
HOSTS = ("a", "a", "b", "b")


class Tree:
    """The ends of all ranks; each joins on a thread of its own."""

    def __init__(self) -> None:
        world = LocalWorld(len(HOSTS))
        self.posts = tree(HOSTS, 2)
        self.ends: dict[int, Branch | ZmqControl] = {}

        def body(rank: int) -> None:
            gather = world.join(rank).gather
            self.ends[rank] = join(self.posts[rank], gather, hosts=HOSTS, interface="127.0.0.1", heartbeat_seconds=0.0)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(HOSTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        self.bells = {rank: Bell() for rank in self.ends}
        for rank, bell in self.bells.items():
            bell.watch(self.ends[rank].descriptors)

    def await_messages(self, rank: int, count: int) -> list:
        found: list = []
        deadline = time.monotonic() + DEADLINE
        while len(found) < count:
            assert time.monotonic() < deadline, f"rank {rank} got {found}, not {count} messages"
            if not self.ends[rank].ready():
                self.bells[rank].sleep(DEADLINE)
            found += self.ends[rank].receive()
        return found

    def close(self, rank: int) -> None:
        self.ends.pop(rank).close()


@pytest.fixture
def made() -> Iterator[Tree]:
    with contextlib.ExitStack() as stack:
        found = Tree()
        stack.callback(lambda: [found.close(rank) for rank in sorted(found.ends, reverse=True)])
        yield found


def speak_up(made: Tree) -> None:
    """Connections are known by their first message."""
    for place in made.posts[1:]:
        made.ends[place.rank].send(place.parent, Goodbye())
    for place in made.posts:
        made.await_messages(place.rank, len(place.children))


def test_everybody_talks_with_the_neighbours_in_the_tree(made):
    assert [place.parent for place in made.posts] == [-1, 0, 0, 2]
    for place in made.posts[1:]:
        made.ends[place.rank].send(place.parent, Report(place.rank))
    assert sorted(made.await_messages(0, 2)) == [(1, Report(1)), (2, Report(2))]
    assert made.await_messages(2, 1) == [(3, Report(3))]
    for place in made.posts[1:]:
        made.ends[place.parent].send(place.rank, Inquiry((place.rank,)))
    for place in made.posts[1:]:
        assert made.await_messages(place.rank, 1) == [(place.parent, Inquiry((place.rank,)))]
    assert made.ends[2].receive() == []
    assert not made.ends[2].ready()


def test_a_message_to_many_is_the_same_for_all(made):
    speak_up(made)
    for message in (Inquiry((1,)), Inquiry((2,)), Inquiry((1,))):
        for child in (1, 2):
            made.ends[0].send(child, message)
    for child in (1, 2):
        assert made.await_messages(child, 3) == [(0, Inquiry((1,))), (0, Inquiry((2,))), (0, Inquiry((1,)))]


@pytest.mark.parametrize(("gone", "noticed"), [(3, {2: 3}), (2, {0: 2, 3: 2}), (0, {1: 0, 2: 0})])
def test_neighbours_hear_of_an_end(made, gone, noticed):
    speak_up(made)
    made.close(gone)
    for rank, lost in noticed.items():
        assert made.await_messages(rank, 1) == [(lost, LOST)]


def test_a_parent_that_does_not_think_so_is_named():
    place = tree(HOSTS, 2)[3]
    with pytest.raises(StartError, match="rank 2 does not listen to rank 3: set fan_in alike on all ranks"):
        join(place, lambda mine: [mine] * 4, hosts=HOSTS, interface="127.0.0.1", heartbeat_seconds=0.0)
