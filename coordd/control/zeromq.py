"""Control channel over ZeroMQ: a star around rank 0 or around a foreman, encrypted and authenticated by CURVE.

On one machine it listens on a Unix socket in a private folder that other users cannot enter; the folder is removed once
all ranks are connected. Between machines it listens on a TCP port, which stops accepting connections at that point.

The server's public key is never sent in clear over the network and is distributed over the data plane only, so it
serves as the secret of the star: a process without it cannot finish the handshake. One thread owns the sockets;
ZeroMQ's own thread moves the bytes without holding the GIL, and detects a dead peer while the daemon is busy.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from coordd.control.connection_limit import HANDSHAKE_SECONDS, Door
from coordd.control.peer_process import Ends, Folder
from coordd.errors import StartError
from coordd.host.fork import close_in_children, close_sockets
from coordd.negotiation.channel import LOST, Lost, read
from coordd.negotiation.wire import MAX_MESSAGE, Scribe
from coordd.ops.messages import Message

__all__ = ["Address", "ZmqControl"]

_LINGER_MS = 500
_BACKLOG = 1024
_CLOSING_SECONDS = 0.3  # time for reading the connection of a process that has ended to its end
_EVENT = struct.Struct("=Hi")  # zmq_socket_monitor(3): number and value; PyZMQ's own parser imports asyncio
_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_LISTENING


@dataclass(frozen=True)
class Address:
    """Where the hub of a star listens, and its key; distributed over the data plane only.

    ``bound`` is the name that the kernel uses for the hub's end of a connection, if it differs from the endpoint.
    """

    endpoint: str
    server_key: bytes
    bound: str = ""


class ZmqControl:
    """One rank's end of the control channel.

    The hub calls `listen` or `listen_here` and distributes the address; the other ranks call `connect`.
    """

    def __init__(self, rank: int, *, heartbeat_seconds: float, hub: int = 0) -> None:
        self._rank = rank
        self._hub = hub
        self._scribe = Scribe()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER if rank == hub else zmq.DEALER)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        if heartbeat_seconds:
            limit = int(heartbeat_seconds * 1000)
            self._socket.set(zmq.HEARTBEAT_IVL, max(1, limit // 4))
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, limit)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._connected: set[int] = set()
        self._rank_of_connection: dict[int, int] = {}
        self._gone: list[int] = []
        self._introduced = False
        self._lost: set[int] = set()
        self._expected = 0
        self._door: Door | None = None
        self._listener = -1
        self._folder: Folder | None = None
        self._is_ours: Callable[[socket.socket], bool] = lambda _: False
        self._ends = Ends()
        self.descriptors: Sequence[int] = (self._socket.fileno(), self._monitor.fileno(), self._ends.descriptor)
        self._changes = select.poll()
        for descriptor in self.descriptors:
            self._changes.register(descriptor, select.POLLIN)
        self._stale = True
        close_in_children(self)

    def listen(self, interface: str, *, children: int = 0) -> Address:
        """Opens the hub's socket on a free port of one interface, until ``children`` ranks have connected.

        With 0 children it accepts connections for ever.
        """
        public = self._make_server()
        port = self._socket.bind_to_random_port(f"tcp://{interface}")
        self._door = Door(port)
        self._expected = children
        self._is_ours = lambda each: each.family == socket.AF_INET and each.getsockname()[1] == port
        return Address(f"tcp://{interface}:{port}", public)

    def listen_here(self, *, children: int) -> Address:
        """Opens the hub's socket for ``children`` processes of this user on this machine.

        They reach it through this process's ``/proc`` entry, so they need not see the same file system.

        Raises:
            OSError: no socket can be created.
        """
        folder = Folder()
        try:
            public = self._make_server()
            self._socket.bind(f"ipc://{folder.path}")
        except zmq.ZMQError as error:
            folder.remove()
            raise OSError(error.errno, str(error)) from error
        self._folder = folder
        self._expected = children
        self._is_ours = lambda each: each.family == socket.AF_UNIX and each.getsockname() == folder.path
        return Address(f"ipc://{folder.alias}", public, folder.path)

    def connect(self, address: Address) -> None:
        """Opens a worker's socket."""
        public, secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_SERVERKEY, address.server_key)
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        self._socket.set(zmq.ROUTING_ID, _identity(self._rank))
        # A broken connection stays broken: the hub has already reported this rank as lost.
        self._socket.set(zmq.RECONNECT_IVL, 50)
        where = address.bound or address.endpoint.removeprefix("tcp://")
        self._is_ours = lambda each: _peer(each) == where
        self._socket.connect(address.endpoint)

    def watch(self, rank: int, pid: int) -> None:
        """Also counts a neighbour on this machine as lost when its process has ended but its connection has not closed.

        A connection stays open in processes that native code of the neighbour has forked.
        """
        self._ends.add(rank, pid)

    def send(self, rank: int, message: Message) -> None:
        """Hands a message to ZeroMQ's thread."""
        data = self._scribe.encode(message)
        self._stale = True
        if self._rank == self._hub:
            self._socket.send_multipart((_identity(rank), data), zmq.NOBLOCK)
        else:
            self._socket.send(data, zmq.NOBLOCK)

    def receive(self) -> list[tuple[int, Message | Lost]]:
        """Returns the received messages; invalid bytes are logged and dropped."""
        if self._stale or self._changes.poll(0):
            self._stale = _readable(self._socket) | _readable(self._monitor) | self._ends.any
        if not self._stale:
            return []
        found = self._messages()
        if lost := self._losses():
            found += self._messages()  # a rank's last messages come before its loss
            found += [(rank, LOST) for rank in lost]
        return found

    def ready(self) -> bool:
        """Returns whether a message may have arrived that no descriptor signals.

        ZeroMQ's descriptors signal only changes since its events were last read, and sending reads them, too.
        """
        return self._stale

    def close(self) -> None:
        """Closes the sockets; sent messages are delivered first, for at most half a second."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        self._ends.close()
        self._is_ours = lambda _: False
        self._shut_door()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the connections."""
        close_sockets(self._is_ours)

    def _make_server(self) -> bytes:
        public, secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        self._socket.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        self._socket.set(zmq.BACKLOG, _BACKLOG)
        return public

    def _shut_door(self) -> None:
        """Accepts no more ranks: all expected ranks have connected."""
        self._expected = 0
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._door is not None and self._listener >= 0:
            self._door.shut(self._listener)

    def _messages(self) -> list[tuple[int, Message | Lost]]:
        found: list[tuple[int, Message | Lost]] = []
        while _readable(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            found += read(self._sender(frames), frames[-1].bytes)
        return found

    def _sender(self, frames: Sequence[zmq.Frame]) -> int:
        if self._rank != self._hub:
            return self._hub
        rank = int.from_bytes(frames[0].bytes[1:], "big")
        if rank not in self._rank_of_connection.values():
            self._introduce(rank, frames[-1].get(zmq.SRCFD))
        return rank

    def _introduce(self, rank: int, descriptor: int) -> None:
        """Records which connection belongs to a rank.

        ZeroMQ reports a connection before it delivers its messages. So the disconnections of this descriptor that it
        has reported by now belong to earlier connections, unless no connection has been accepted since.
        """
        self._gone += self._disconnected()
        if descriptor in self._connected:
            self._rank_of_connection[descriptor] = rank
        else:
            self._gone.append(rank)

    def _losses(self) -> list[int]:
        """Returns the ranks of lost neighbours, each once.

        All messages of a process that has ended are readable by then.
        """
        found = [*self._gone, *self._disconnected()]
        self._gone = []
        if ended := [rank for rank in self._ends.take() if rank not in {*self._lost, *found}]:
            deadline = time.monotonic() + _CLOSING_SECONDS
            while set(ended) - set(found) and (left := deadline - time.monotonic()) > 0:
                self._monitor.poll(int(left * 1000) + 1)
                found += self._disconnected()
        if self._expected and len(self._rank_of_connection) == self._expected:
            self._shut_door()
        lost = [rank for rank in dict.fromkeys([*found, *ended]) if rank not in self._lost]
        self._lost.update(lost)
        return lost

    def _disconnected(self) -> list[int]:
        """Returns the ranks whose connections have closed, as far as ZeroMQ has reported since the last call."""
        found = []
        while _readable(self._monitor):
            event, value = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event != zmq.EVENT_DISCONNECTED:
                self._note(event, value)
            elif self._rank != self._hub:
                found += [self._hub] if self._introduced else []  # before the handshake, ZeroMQ retries
            else:
                self._connected.discard(value)
                rank = self._rank_of_connection.pop(value, None)
                found += [] if rank is None else [rank]
                self._note(event, value)
        return found

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._introduced = True
        elif event == zmq.EVENT_LISTENING:
            self._listener = value
        elif event == zmq.EVENT_ACCEPTED:
            self._connected.add(value)
            if self._door is not None:
                self._door.arrive(value)
        elif self._door is not None:
            self._door.leave(value)


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _peer(connected: socket.socket) -> str:
    """Formats the address of the other end of a connection like an endpoint."""
    peer = connected.getpeername()
    return f"{peer[0]}:{peer[1]}" if connected.family == socket.AF_INET else str(peer)


def _identity(rank: int) -> bytes:
    """The routing id of a rank; ZeroMQ reserves ids that begin with a zero byte."""
    return b"r" + rank.to_bytes(4, "big")


def interface_for(hosts: Sequence[str], wanted: str) -> str:
    """Chooses the address that the hub of a star listens on.

    Args:
        hosts: the host names of its ranks; if all are equal, loopback is enough.
        wanted: an address or the name of an interface, from the user; empty to choose automatically.

    Raises:
        StartError: the interface does not exist, or no interface can be reached from other hosts.
    """
    if not wanted and len(set(hosts)) == 1:
        return "127.0.0.1"
    import psutil  # slow to import (as long as ZeroMQ); ranks of one host do not need it

    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    usable = {name: found[0] for name, found in addresses.items() if found and psutil.net_if_stats()[name].isup}
    if wanted:
        if wanted not in {*usable, *usable.values()}:
            text = f"no interface {wanted!r} on {os.uname().nodename}; there are {', '.join(sorted(usable))}"
            raise StartError(text)
        return usable.get(wanted, wanted)
    outward = [address for address in usable.values() if not address.startswith("127.")]
    if not outward:
        text = f"{os.uname().nodename} has no network interface that other hosts could reach"
        raise StartError(text)
    return outward[0]
