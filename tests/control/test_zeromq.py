"""The control channel over real sockets on loopback."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import zmq

from coordd.control.zeromq import Address, ZmqControl, interface_for
from coordd.daemon.wakeup import Bell
from coordd.errors import StartError
from coordd.negotiation.channel import LOST
from coordd.negotiation.wire import MAX_MESSAGE, WireError
from coordd.ops.messages import Goodbye, Hello, Inquiry, Report

DEADLINE = 10.0


class Star:
    """A coordinator and members, each with a bell that its descriptors ring."""

    def __init__(self, size: int, heartbeat: float = 0.0) -> None:
        self.ends = [ZmqControl(rank, heartbeat_seconds=heartbeat) for rank in range(size)]
        self.bells = [Bell() for _ in range(size)]
        self.open = set(range(size))
        self.address = self.ends[0].listen("127.0.0.1")
        for rank, (end, bell) in enumerate(zip(self.ends, self.bells, strict=True)):
            bell.watch(end.descriptors)
            if rank:
                end.connect(self.address)

    def await_messages(self, rank: int, count: int) -> list:
        """Sleeps on the bell, as the daemon does, until so many messages have come."""
        found: list = []
        deadline = time.monotonic() + DEADLINE
        while len(found) < count:
            assert time.monotonic() < deadline, f"rank {rank} got {found}, not {count} messages"
            if not self.ends[rank].ready():
                self.bells[rank].sleep(DEADLINE)
            found += self.ends[rank].receive()
        return found

    def close(self, rank: int) -> None:
        self.open.discard(rank)
        self.ends[rank].close()


@pytest.fixture
def star() -> Iterator[Callable[..., Star]]:
    with contextlib.ExitStack() as stack:

        def make(size: int, **options: float) -> Star:
            made = Star(size, **options)
            stack.callback(lambda: [made.close(rank) for rank in sorted(made.open, reverse=True)])
            return made

        yield make


def stranger(address: Address, *, server_key: bytes, identity: bytes = b"") -> zmq.Socket:
    context = zmq.Context()
    end = context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    end.set(zmq.CURVE_SERVERKEY, server_key)
    end.set(zmq.CURVE_PUBLICKEY, public)
    end.set(zmq.CURVE_SECRETKEY, secret)
    end.set(zmq.ROUTING_ID, identity)
    end.set(zmq.LINGER, 0)
    end.connect(address.endpoint)
    return end


def tcp_connections() -> list:
    """Lists the TCP connections of this process."""
    return [each for each in psutil.Process().net_connections("tcp4") if each.status == psutil.CONN_ESTABLISHED]


def leave(end: zmq.Socket) -> None:
    end.close()
    end.context.term()


def test_members_and_coordinator_talk_both_ways_in_order(star):
    made = star(3)
    for rank in (1, 2):
        made.ends[rank].send(0, Hello("1", "digest", rank, "host"))
        made.ends[rank].send(0, Report(rank, b"\1" * 1000))
    heard = made.await_messages(0, 4)
    for rank in (1, 2):
        assert [message for sender, message in heard if sender == rank] == [
            Hello("1", "digest", rank, "host"),
            Report(rank, b"\1" * 1000),
        ]
        made.ends[0].send(rank, Inquiry())
        made.ends[0].send(rank, Goodbye())
        assert made.await_messages(rank, 2) == [(0, Inquiry()), (0, Goodbye())]
    assert made.ends[0].receive() == []


def test_many_messages_wake_a_sleeper_every_time(star):
    made = star(2)
    made.ends[1].send(0, Report(0))
    for number in range(300):
        assert made.await_messages(0, 1) == [(1, Report(number))]
        made.ends[0].send(1, Report(number))
        assert made.await_messages(1, 1) == [(0, Report(number))]
        made.ends[1].send(0, Report(number + 1))


def test_the_coordinator_hears_which_member_is_gone(star):
    made = star(3)
    for rank in (1, 2):
        made.ends[rank].send(0, Goodbye())
    made.await_messages(0, 2)
    made.close(2)
    assert made.await_messages(0, 1) == [(2, LOST)]
    made.ends[0].send(2, Goodbye())  # goes nowhere, quietly
    made.ends[0].send(1, Inquiry())
    assert made.await_messages(1, 1) == [(0, Inquiry())]


def test_a_member_hears_that_the_coordinator_is_gone(star):
    made = star(2)
    made.ends[1].send(0, Goodbye())
    made.await_messages(0, 1)
    made.close(0)
    assert made.await_messages(1, 1) == [(0, LOST)]
    made.ends[1].send(0, Goodbye())  # goes nowhere, quietly


def test_the_end_of_an_earlier_connection_with_the_same_descriptor_is_no_loss(star):
    """All of it has happened before the hub looks: it reads messages first, and how connections ended afterwards."""
    made = star(1)
    member = ZmqControl(1, heartbeat_seconds=0.0)
    host, port = made.address.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        assert raw.recv(1), "no greeting"
        hubs_end = next(each for each in tcp_connections() if each.laddr.port == int(port) and each.raddr)
    deadline = time.monotonic() + DEADLINE
    while any(each.fd == hubs_end.fd for each in tcp_connections()):
        assert time.monotonic() < deadline, "the hub has kept its end of a closed connection"
    member.connect(made.address)  # its end gets the number of `raw`, the hub's the one of `hubs_end`
    member.send(0, Inquiry())
    assert made.ends[0]._socket.poll(DEADLINE * 1e3)
    assert hubs_end.fd in [each.fd for each in tcp_connections() if each.laddr.port == int(port)]
    assert made.ends[0].receive() == [(1, Inquiry())]
    assert made.ends[0].receive() == []
    member.close()
    assert made.await_messages(0, 1) == [(1, LOST)]


def test_a_member_that_has_left_before_the_hub_looks_is_lost(star):
    made = star(2)
    made.ends[1].send(0, Goodbye())
    assert made.ends[0]._socket.poll(DEADLINE * 1e3)
    made.close(1)
    deadline = time.monotonic() + DEADLINE
    port = int(made.address.endpoint.rpartition(":")[2])
    while any(each.laddr.port == port and each.raddr for each in tcp_connections()):
        assert time.monotonic() < deadline, "the hub has kept its end of a closed connection"
    assert made.await_messages(0, 2) == [(1, Goodbye()), (1, LOST)]


def test_what_was_sent_before_leaving_arrives(star):
    made = star(2)
    made.ends[1].send(0, Goodbye())
    made.close(1)
    assert made.await_messages(0, 2) == [(1, Goodbye()), (1, LOST)]


def test_who_has_not_the_key_cannot_come_in(star):
    made = star(2)
    wrong, _ = zmq.curve_keypair()
    intruder = stranger(made.address, server_key=wrong, identity=b"r\0\0\0\1")
    intruder.send(b"\x91\xa7goodbye")
    with intruder.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        assert monitor.poll(DEADLINE * 1e3), "the intruder was not thrown out"
        intruder.disable_monitor()
    with socket.create_connection(made.address.endpoint.removeprefix("tcp://").split(":")) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    made.ends[1].send(0, Inquiry())
    assert made.await_messages(0, 1) == [(1, Inquiry())]
    made.ends[1].send(0, Goodbye())
    assert made.await_messages(0, 1) == [(1, Goodbye())]
    leave(intruder)


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 40, b"\x91\xa7unknown", b"\x80\x04\x95cos\nsystem\n"])
def test_bytes_that_are_no_message_are_logged_and_dropped(star, caplog, garbage):
    made = star(1)
    peer = stranger(made.address, server_key=made.address.server_key, identity=b"r\0\0\0\5")
    peer.send(garbage)
    peer.send(b"\x91\xa7goodbye")
    assert made.await_messages(0, 1) == [(5, Goodbye())]
    assert "dropped a control message from rank 5" in caplog.text
    leave(peer)


def test_a_message_beyond_the_limit_is_refused_on_both_ends(star):
    made = star(2)
    with pytest.raises(WireError, match="exceeds the limit"):
        made.ends[1].send(0, Report(0, b"\0" * (MAX_MESSAGE + 1)))
    peer = stranger(made.address, server_key=made.address.server_key, identity=b"r\0\0\0\5")
    peer.send(b"\x91\xa7goodbye")
    made.await_messages(0, 1)
    peer.send(b"\0" * (MAX_MESSAGE + 1))
    assert made.await_messages(0, 1) == [(5, LOST)]
    leave(peer)


def test_heartbeats_do_not_end_an_idle_connection(star):
    made = star(2, heartbeat=0.05)
    made.ends[1].send(0, Goodbye())
    made.await_messages(0, 1)
    made.bells[0].sleep(0.15)
    made.ends[0].send(1, Inquiry())
    assert made.await_messages(1, 1) == [(0, Inquiry())]


def test_one_host_needs_loopback_only():
    assert interface_for(["a", "a"], "") == "127.0.0.1"


def test_an_interface_is_found_by_name_and_by_address():
    assert interface_for(["a", "b"], "lo") == "127.0.0.1"
    assert interface_for(["a", "b"], "127.0.0.1") == "127.0.0.1"
    with pytest.raises(StartError, match=r"no interface 'eth77' on .*; there are .*lo"):
        interface_for(["a", "b"], "eth77")


def test_several_hosts_need_an_outward_interface(monkeypatch):
    entry = type("Entry", (), {"family": socket.AF_INET, "address": "127.0.0.1"})
    up = type("Stats", (), {"isup": True})
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [entry]})
    monkeypatch.setattr("psutil.net_if_stats", lambda: {"lo": up, "eth0": up})
    with pytest.raises(StartError, match="no network interface that other hosts could reach"):
        interface_for(["a", "b"], "")
    outward = type("Entry", (), {"family": socket.AF_INET, "address": "10.0.0.7"})
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [entry], "eth0": [outward]})
    assert interface_for(["a", "b"], "") == "10.0.0.7"
