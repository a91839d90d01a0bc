"""Messages through memory: whatever way each of them takes, they come in the order of sending, and wake who sleeps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd.control.shared_memory import Edge, Nearby, join
from coordd.daemon.wakeup import Bell
from coordd.negotiation.channel import LOST
from coordd.negotiation.tree import post
from coordd.ops.messages import Abort, Failure, Hello, Inquiry, Message, Plan, Report
from coordd.transport.local import LocalWorld
from coordd.transport.shared_memory.board import Board
from coordd.transport.shared_memory.host_memory import Commons
from coordd.transport.shared_memory.ring_buffer import RingReader, RingWriter
from tests.neighbours import lacking

ROOM = 300
TOO_LONG = 5.0
HELLO = Hello("1", "digest", 1, "host")


class Wire:
    """What is on its way over the network, and what has arrived, by receiver."""

    def __init__(self) -> None:
        self.under_way: dict[int, deque] = {0: deque(), 1: deque()}
        self.arrived: dict[int, deque] = {0: deque(), 1: deque()}

    def deliver(self, rank: int) -> None:
        if self.under_way[rank]:
            self.arrived[rank].append(self.under_way[rank].popleft())


class Far:
    """A control channel of two ranks over a wire that delivers when a test says so."""

    descriptors = ()

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank

    def send(self, rank: int, message: Message) -> None:
        self._wire.under_way[rank].append((self._rank, message))

    def receive(self) -> list:
        arrived = self._wire.arrived[self._rank]
        return [arrived.popleft() for _ in range(len(arrived))]

    def ready(self) -> bool:
        return bool(self._wire.arrived[self._rank])

    def close(self) -> None:
        self._wire.under_way[1 - self._rank].append((self._rank, LOST))


class Boards:
    """Counts who is called."""

    def __init__(self) -> None:
        self.called = 0

    def call(self) -> None:
        self.called += 1


class Pair:
    """Two ranks, whose rings lie in `memory`, by receiver."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.memory = [memoryview(bytearray(128 + ROOM)) for _ in range(2)]
        self.boards = [Boards(), Boards()]
        self.ends = [self._end(rank) for rank in range(2)]

    def _end(self, rank: int) -> Nearby:
        other = 1 - rank
        edge = Edge(RingWriter(self.memory[other]), RingReader(self.memory[rank]), upward=rank == 1)
        return Nearby(Far(self.wire, rank), {other: edge}, {other: self.boards[other]})

    def settle(self, rank: int) -> list:
        """Lets everything arrive."""
        while self.wire.under_way[rank]:
            self.wire.deliver(rank)
        return self.ends[rank].receive()

    def meet(self) -> None:
        for rank, end in enumerate(self.ends):
            end.send(1 - rank, HELLO)
        for rank in range(2):
            assert self.settle(rank) == [(1 - rank, HELLO)]


@pytest.fixture
def pair() -> Pair:
    made = Pair()
    made.meet()
    return made


steps = st.tuples(
    st.sampled_from(["send", "send", "send", "deliver", "receive"]), st.integers(0, 1), st.integers(0, ROOM + 20)
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=80))
def test_messages_come_once_and_in_order_whatever_way_they_take(program):
    made = Pair()
    sent: list[list[Message]] = [[], []]
    found: list[list[Message]] = [[], []]
    for what, rank, size in program:
        if what == "send":
            sent[rank].append(Report(len(sent[rank]), bytes(size)))
            made.ends[rank].send(1 - rank, sent[rank][-1])
        elif what == "deliver":
            made.wire.deliver(rank)
        else:
            ready = made.ends[rank].ready()
            arrived = made.ends[rank].receive()
            assert ready or not arrived
            assert not made.ends[rank].ready()  # or it would never sleep
            found[1 - rank] += [message for _, message in arrived]
        assert all(found[rank] == sent[rank][: len(found[rank])] for rank in range(2))
    for rank in range(2):
        found[1 - rank] += [message for _, message in made.settle(rank)]
    assert found == sent


def test_messages_go_through_memory_and_ring(pair):
    pair.boards[1].called = 0
    for number in range(100):
        pair.ends[0].send(1, Report(number))
        assert pair.ends[1].ready()
        assert pair.ends[1].receive() == [(0, Report(number))]
    assert not any(pair.wire.under_way.values())
    assert pair.boards[1].called == 100


def test_only_the_first_message_to_the_parent_takes_the_network():
    made = Pair()
    made.ends[0].send(1, HELLO)  # the network would lose it, as long as it does not know the child
    assert made.ends[1].receive() == [(0, HELLO)]
    made.ends[1].send(0, HELLO)
    assert made.ends[0].receive() == []
    assert made.settle(0) == [(1, HELLO)]


def test_what_a_rank_had_sent_comes_before_its_loss(pair):
    last = [Inquiry(), Report(7, bytes(ROOM)), Abort(Failure(1, "failed"))]  # the second one takes the network
    for message in last:
        pair.ends[1].send(0, message)
    pair.ends[1].close()
    assert pair.settle(0) == [*((1, message) for message in last), (1, LOST)]
    pair.ends[0].send(1, Inquiry())  # goes nowhere, quietly
    assert pair.settle(0) == []


def test_what_lies_in_a_ring_comes_before_a_loss_that_is_seen_first(pair):
    """A process may die between two messages, and its memory is looked at after its connection."""
    pair.ends[1].send(0, Plan(1, stop=True))
    pair.wire.arrived[0].append((1, LOST))
    assert pair.ends[0].receive() == [(1, Plan(1, stop=True)), (1, LOST)]


def test_a_broken_ring_counts_as_the_loss_of_its_writer(pair, caplog):
    pair.ends[1].send(0, Inquiry())
    pair.ends[1].send(0, Inquiry())
    pair.memory[0][128 + 3] = 255
    assert pair.ends[0].receive() == [(1, LOST)]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "what rank 1 tells in common memory" in caplog.text
    assert not pair.ends[0].ready()
    pair.ends[0].send(1, Abort(Failure(1, "is not heard any more")))  # it may hear, though
    assert pair.settle(1) == [(0, Abort(Failure(1, "is not heard any more")))]


def test_the_network_is_looked_at_now_and_then_and_again_when_it_has_brought_something(monkeypatch):
    now = 0.0
    monkeypatch.setattr("coordd.control.shared_memory.time.monotonic", lambda: now)
    wire = Wire()
    end = Nearby(Far(wire, 0), {}, {}, pause=1.0)
    assert end.receive() == []
    wire.arrived[0].append((1, HELLO))
    assert end.receive() == []
    now = 1.0
    assert end.receive() == [(1, HELLO)]
    wire.arrived[0].append((1, Inquiry()))
    assert end.receive() == [(1, Inquiry())]
    assert end.receive() == []
    wire.arrived[0].append((1, LOST))
    assert end.receive() == []
    now = 2.0
    assert end.receive() == [(1, LOST)]


def test_bytes_that_are_no_message_are_dropped_and_told(pair, caplog):
    edge = pair.ends[1]._edges[0]
    assert edge.put(b"\xc1nothing")
    pair.ends[1].send(0, Inquiry())
    assert pair.ends[0].receive() == [(1, Inquiry())]
    assert "dropped a control message from rank 1" in caplog.text


# On boards, and between threads.


@contextmanager
def joined(hosts: Sequence[str]) -> Iterator[list[Nearby]]:
    """The ends of the ranks of several hosts, with their bells and commons."""
    lanes = LocalWorld(len(hosts))
    bells = [Bell() for _ in hosts]
    boards, cards = zip(*[Board.create(bell.descriptor) for bell in bells], strict=True)
    ends: dict[int, Nearby] = {}

    def enter(rank: int) -> None:
        near = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        commons = Commons(near, rank, [boards[rank] if other == rank else Board.of(cards[other]) for other in near])
        end = join(Far(Wire(), rank), post(rank, hosts, 2), lanes.join(rank).gather, commons)
        end.bell, end.commons = bells[rank], commons
        ends[rank] = end

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    try:
        yield [ends[rank] for rank in range(len(hosts))]
    finally:
        for end, bell in zip(ends.values(), bells, strict=True):
            end.commons.close()
            bell.close()


def test_only_neighbours_in_the_tree_and_on_the_host_have_rings():
    with joined("aabba") as ends:
        assert [sorted(end._edges) for end in ends] == [[1, 4], [0], [3], [2], [0]]


def test_every_edge_has_its_own_rings():
    with joined("aaa") as ends:
        for child in (1, 2):
            assert not ends[child]._edges[0].put(b"")  # the first takes the network
            ends[0]._edges[child].pass_on()
        for rank, end in enumerate(ends):
            for other, edge in end._edges.items():
                assert edge.put(bytes([rank, other]))
        for rank, end in enumerate(ends):
            for other, edge in end._edges.items():
                assert list(edge.take()) == [bytes([other, rank])]


def test_all_take_the_network_if_one_has_no_memory(monkeypatch):
    lacking(monkeypatch)
    with joined("aaa") as ends:
        assert all(isinstance(end, Far) for end in ends)


def test_what_a_rank_sends_lies_there_after_it_has_left():
    with joined("aa") as ends:
        first, second = ends
        first._edges[1]._come = 1
        second._edges[0].put(b"")
        second.send(0, Inquiry())
        first.send(1, HELLO)
        second.close()
        del second, ends[1]
        first.send(1, Inquiry())  # to where nobody is
        assert first.receive() == [(1, Inquiry())]


def hear(end: Nearby) -> list:
    """Sleeps until something has arrived, as the daemon does.

    Raises:
        TimeoutError: nobody rang.
    """
    while not (found := end.receive()):
        end.commons.mine.fall_asleep(data=False)
        since = time.monotonic()
        if not end.ready():
            end.bell.sleep(TOO_LONG)
        end.commons.mine.wake_up()
        if time.monotonic() - since > TOO_LONG - 1:
            raise TimeoutError
    return found


def test_no_message_is_slept_through():
    """Two ranks tell each other numbers in turns."""
    rounds, heard = 2000, [0, 0]
    with joined("aa") as ends:
        for rank, end in enumerate(ends):
            end._edges[1 - rank].put(b"")
            end._edges[1 - rank].pass_on()

        def play(rank: int) -> None:
            for number in range(rounds):
                if number % 2 == rank:
                    ends[rank].send(1 - rank, Report(number))
                else:
                    heard[rank] += hear(ends[rank]) == [(1 - rank, Report(number))]

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert heard == [rounds // 2] * 2
