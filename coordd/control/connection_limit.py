"""Limits what processes without the key can do to a listening TCP port: hold descriptors, and keep its owner busy.

A client that has not proven that it knows the server's key gets the ZMTP greeting and nothing else, so a connection
counts as authenticated once the other end has received more than that. Unauthenticated connections are limited in
number, per remote host and in total, and libzmq ends them after ``HANDSHAKE_SECONDS``. Once all expected ranks are
connected the kernel drops every new connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct

__all__ = ["HANDSHAKE_SECONDS", "Door"]

HANDSHAKE_SECONDS = 5.0
MOST_PER_HOST = 64
"""Maximum number of unauthenticated connections of one remote host."""
MOST = 256
"""Maximum number of unauthenticated connections of all hosts."""

_UNAUTHENTICATED = 100
"""More bytes than a ZMTP greeting, 64, and fewer than a greeting and a CURVE WELCOME, 170 more."""
_BYTES_ACKED = struct.Struct("=120xQ")  # tcpi_bytes_acked of struct tcp_info
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of socket(7)
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF: return 0 bytes of the packet


class Door:
    """The accepted connections of a listening TCP socket; libzmq owns the descriptors, and may close them any time."""

    def __init__(self, port: int) -> None:
        """Starts with no connection; ``port`` is the listening one."""
        self._port = port
        self._waiting: dict[int, str] = {}  # descriptor: remote host; in the order of arrival

    def arrive(self, descriptor: int) -> None:
        """Records an accepted connection, and ends the oldest ones above the limits."""
        with contextlib.suppress(OSError), _copy(descriptor) as copy:
            self._waiting.pop(descriptor, None)
            self._waiting[descriptor] = copy.getpeername()[0]
            self._limit(self._waiting[descriptor])

    def leave(self, descriptor: int) -> None:
        """Records the end of a connection."""
        self._waiting.pop(descriptor, None)

    def _limit(self, host: str) -> None:
        if len(self._waiting) <= MOST and self._count(host) <= MOST_PER_HOST:
            return
        for descriptor in [each for each in self._waiting if self._authenticated(each)]:
            del self._waiting[descriptor]
        while self._count(host) > MOST_PER_HOST:
            self._end(next(each for each, other in self._waiting.items() if other == host))
        while len(self._waiting) > MOST:
            self._end(next(iter(self._waiting)))

    def _count(self, host: str) -> int:
        return sum(other == host for other in self._waiting.values())

    def _authenticated(self, descriptor: int) -> bool:
        try:
            with _copy(descriptor) as copy:
                return self._is_ours(copy) and _acked(copy) > _UNAUTHENTICATED
        except OSError:  # closed by now
            return True

    def _end(self, descriptor: int) -> None:
        """Makes libzmq see a connection's end; uses a copy, so that the number cannot come to mean another file."""
        del self._waiting[descriptor]
        with contextlib.suppress(OSError), _copy(descriptor) as copy:
            if self._is_ours(copy) and _acked(copy) <= _UNAUTHENTICATED:
                copy.shutdown(socket.SHUT_RDWR)

    def _is_ours(self, copy: socket.socket) -> bool:
        return copy.family == socket.AF_INET and bool(copy.getsockname()[1] == self._port)

    def shut(self, listener: int) -> None:
        """Makes the kernel drop new connections, and ends unauthenticated ones; the others stay.

        libzmq has no way to stop listening that leaves its connections alone.
        """
        code = ctypes.create_string_buffer(_DROP_ALL)
        program = struct.pack("@HP", 1, ctypes.addressof(code))
        with contextlib.suppress(OSError), _copy(listener) as copy:  # without BPF only the limits apply
            if self._is_ours(copy):
                copy.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
        for descriptor in list(self._waiting):
            self._end(descriptor)


def _copy(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _acked(copy: socket.socket) -> int:
    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    (count,) = _BYTES_ACKED.unpack(info.ljust(_BYTES_ACKED.size, b"\xff"))  # older kernels do not provide it
    return int(count)
