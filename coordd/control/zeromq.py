"""The control channel over ZeroMQ: a star around rank 0, or around a foreman, encrypted and authenticated by CURVE.

The server's public key never crosses the network in clear and is handed out over the data plane only, so it is the
star's secret: whoever does not have it cannot finish the handshake. One thread owns the sockets; ZeroMQ's own thread
moves the bytes outside the interpreter's lock, and notices a dead peer while the daemon is busy.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from coordd.control.protocol import LOST, Lost, read
from coordd.errors import StartError
from coordd.messages import Message
from coordd.wire import MAX_MESSAGE, Scribe

__all__ = ["Address", "ZmqControl"]

_LINGER_MS = 500
_EVENT = struct.Struct("=Hi")  # zmq_socket_monitor(3): number and value; PyZMQ's own reader of it imports asyncio


@dataclass(frozen=True)
class Address:
    """Where the hub of a star listens, and the keys; it travels over the data plane only."""

    endpoint: str
    server_key: bytes


class ZmqControl:
    """One rank's end.

    On the hub call `listen`, hand the address out, and `connect` elsewhere.
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
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._rank_of_connection: dict[int, int] = {}
        self.descriptors: Sequence[int] = (self._socket.fileno(), self._monitor.fileno())
        self._changes = select.poll()
        for descriptor in self.descriptors:
            self._changes.register(descriptor, select.POLLIN)
        self._stale = True

    def listen(self, interface: str) -> Address:
        """Opens the hub's side on one interface, on a free port."""
        public, secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        port = self._socket.bind_to_random_port(f"tcp://{interface}")
        return Address(f"tcp://{interface}:{port}", public)

    def connect(self, address: Address) -> None:
        """Opens a member's side."""
        public, secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_SERVERKEY, address.server_key)
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        self._socket.set(zmq.ROUTING_ID, _identity(self._rank))
        # A connection that broke stays broken: the hub has already told everybody that this rank is lost.
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.connect(address.endpoint)

    def send(self, rank: int, message: Message) -> None:
        """Hands a message to ZeroMQ's thread."""
        data = self._scribe.encode(message)
        self._stale = True
        if self._rank == self._hub:
            self._socket.send_multipart((_identity(rank), data), zmq.NOBLOCK)
        else:
            self._socket.send(data, zmq.NOBLOCK)

    def receive(self) -> list[tuple[int, Message | Lost]]:
        """Takes what has arrived; bytes that are no message are logged and dropped."""
        if not self.ready():
            return []
        found: list[tuple[int, Message | Lost]] = []
        while _readable(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            found += read(self._sender(frames), frames[-1].bytes)
        return found + self._losses()

    def ready(self) -> bool:
        """Says whether something may have arrived.

        ZeroMQ's descriptors tell only of changes since its events were last looked at, and sending looks at them too.
        """
        if self._stale or self._changes.poll(0):
            self._stale = _readable(self._socket) | _readable(self._monitor)
        return self._stale

    def close(self) -> None:
        """Leaves; what was sent is delivered first, for at most half a second."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _sender(self, frames: Sequence[zmq.Frame]) -> int:
        if self._rank != self._hub:
            return self._hub
        rank = int.from_bytes(frames[0].bytes[1:], "big")
        if rank not in self._rank_of_connection.values():
            self._rank_of_connection[frames[-1].get(zmq.SRCFD)] = rank
        return rank

    def _losses(self) -> list[tuple[int, Message | Lost]]:
        found: list[tuple[int, Message | Lost]] = []
        while _readable(self._monitor):
            _, connection = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            gone = self._rank_of_connection.pop(connection, -1)
            rank = gone if self._rank == self._hub else self._hub
            if rank >= 0:
                found.append((rank, LOST))
        return found


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _identity(rank: int) -> bytes:
    """The routing id of a rank; ZeroMQ reserves ids that begin with a zero byte."""
    return b"r" + rank.to_bytes(4, "big")


def interface_for(hosts: Sequence[str], wanted: str) -> str:
    """Chooses the address that the hub of a star listens on.

    Args:
        hosts: the host names of its ranks; if they are all one, loopback is enough.
        wanted: an address or the name of an interface, from the user; empty to choose.

    Raises:
        StartError: there is no such interface.
    """
    if not wanted and len(set(hosts)) == 1:
        return "127.0.0.1"
    import psutil  # takes as long to import as ZeroMQ, and ranks of one host need none of it

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
