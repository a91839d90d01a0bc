"""What real processes do to the control channel: die with children that live on, be stopped, connect uninvited."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordd.control import peer_process
from coordd.control.connection_limit import MOST_PER_HOST
from coordd.control.peer_process import Ends, Identity
from coordd.control.zeromq import Address, ZmqControl
from coordd.negotiation.channel import LOST
from coordd.ops.messages import Goodbye, Inquiry, Report

DEADLINE = 20.0
# A rank that says two things and then does what its last argument says. Its own child ends with this test.
MEMBER = """
import ctypes, os, signal, sys
from coordd.control.zeromq import Address, ZmqControl
from coordd.ops.messages import Goodbye, Report

native = ctypes.PyDLL(None)
end = ZmqControl(1, heartbeat_seconds=float(sys.argv[4]))
end.connect(Address(sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3]))
end.send(0, Goodbye())
sys.stdin.readline()
if sys.argv[5] in {"os.fork", "native fork"}:
    number = os.fork() if sys.argv[5] == "os.fork" else native.fork()
    if number == 0:
        sys.stdin.readline()
        os._exit(0)
    end.send(0, Report(7))
    end._socket.poll(200)  # until it is on its way
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[5] == "keeps Python's lock":
    native.usleep(1_500_000)
    end.send(0, Report(7))
sys.stdin.readline()
"""


class Hub:
    """Rank 0, in this process."""

    def __init__(self, heartbeat: float = 0.0) -> None:
        self.end = ZmqControl(0, heartbeat_seconds=heartbeat)

    def await_messages(self, count: int) -> list:
        found: list = []
        poll, deadline = select.poll(), time.monotonic() + DEADLINE
        for descriptor in self.end.descriptors:
            poll.register(descriptor, select.POLLIN)
        while len(found) < count:
            assert time.monotonic() < deadline, f"got {found}, not {count} messages"
            if not self.end.ready():
                poll.poll(100)
            found += self.end.receive()
        return found

    def settle(self) -> None:
        """Lets rank 0 look at what is new, as its daemon does when it is woken."""
        while self.end.ready():
            assert self.end.receive() == []


@contextlib.contextmanager
def member(address: Address, what: str, *, heartbeat: float = 0.0) -> Iterator[subprocess.Popen]:
    words = (address.endpoint, address.server_key.hex(), getattr(address, "bound", ""), str(heartbeat), what)
    with subprocess.Popen([sys.executable, "-c", MEMBER, *words], stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def go_on(process: subprocess.Popen) -> None:
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.end.close()


@pytest.mark.parametrize("what", ["os.fork", "native fork"])
def test_a_process_that_dies_is_lost_though_its_child_lives(hub, what):
    with member(hub.end.listen("127.0.0.1"), what) as process:
        assert hub.await_messages(1) == [(1, Goodbye())]
        hub.end.watch(1, process.pid)
        go_on(process)
        assert hub.await_messages(2) == [(1, Report(7)), (1, LOST)]
        assert hub.end.receive() == []


def test_a_rank_whose_native_code_keeps_pythons_lock_is_not_lost():
    hub = Hub(heartbeat=0.5)
    with member(hub.end.listen("127.0.0.1"), "keeps Python's lock", heartbeat=0.5) as process:
        hub.await_messages(1)
        go_on(process)
        assert hub.await_messages(1) == [(1, Report(7))]
    hub.end.close()


def test_a_rank_that_is_stopped_is_lost_after_its_heartbeats():
    hub = Hub(heartbeat=0.5)
    with member(hub.end.listen("127.0.0.1"), "waits", heartbeat=0.5) as process:
        hub.await_messages(1)
        process.send_signal(signal.SIGSTOP)
        assert hub.await_messages(1) == [(1, LOST)]
    hub.end.close()


def test_on_one_machine_the_socket_is_private_and_goes_when_all_have_come(hub):
    address = hub.end.listen_here(children=1)
    folder = Path(address.bound).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with member(address, "waits") as process:
        assert hub.await_messages(1) == [(1, Goodbye())]
        assert not folder.exists()
        process.kill()
        assert hub.await_messages(1) == [(1, LOST)]


def test_without_a_place_for_a_socket_that_is_an_error(hub, monkeypatch):
    def fail(**_):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(peer_process.tempfile, "mkdtemp", fail)
    with pytest.raises(OSError, match="read-only"):
        hub.end.listen_here(children=1)


def silent(address: Address, count: int) -> list[socket.socket]:
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    found = []
    for _ in range(count):
        found.append(socket.socket())
        found[-1].setblocking(False)
        found[-1].connect_ex((host, int(port)))
    return found


def await_end(connections: list[socket.socket], count: int, hub: Hub) -> None:
    """Waits until all but ``count`` connections have been ended by rank 0."""
    deadline = time.monotonic() + DEADLINE
    while len(left := [each for each in connections if not ended(each)]) > count:
        assert time.monotonic() < deadline, f"{len(left)} connections are left"
        hub.settle()
        select.select([], [], [], 0.01)


def ended(connection: socket.socket) -> bool:
    """Whether the other end has closed it; what came before is the greeting."""
    try:
        return any(connection.recv(1024) == b"" for _ in range(2))
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_silent_connections_cannot_use_up_descriptors(hub):
    strangers = silent(address := hub.end.listen("127.0.0.1", children=1), 5 * MOST_PER_HOST)
    await_end(strangers, MOST_PER_HOST, hub)
    with member(address, "waits"):
        assert hub.await_messages(1) == [(1, Goodbye())]
        await_end(strangers, 0, hub)
        (late,) = silent(address, 1)
        assert not select.select([], [late], [], 0.3)[1], "a connection was made after all ranks had come"
        hub.end.send(1, Inquiry())
    assert hub.await_messages(1) == [(1, LOST)]
    for each in (*strangers, late):
        each.close()


def test_a_process_is_known_by_what_it_has_open():
    read, write = os.pipe()
    found = Identity.of(read)
    assert found.here
    assert not found._replace(inode=found.inode + 1).here
    assert not found._replace(pid=2**22 + 1).here
    os.close(read)
    os.close(write)
    assert not found.here


def test_the_end_of_a_process_is_told_once():
    ends = Ends()
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        ends.add(3, process.pid)
        assert not ends.any
        assert ends.take() == []
        process.kill()
        assert select.select([ends.descriptor], [], [], DEADLINE)[0]
        assert ends.take() == [3]
        assert ends.take() == []
    ends.close()
