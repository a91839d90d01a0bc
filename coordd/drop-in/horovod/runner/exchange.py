"""How a function reaches the ranks of `horovod.run`, and what it returned comes back: over a socket of the caller.

Both sides prove that they know a key, which is in the environment of the ranks alone. What has not proven it yet is
limited in number and in time, so that it cannot use up the caller's descriptors.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Self

__all__ = ["Exchange", "connect", "pickled"]

MAX_UNAUTHENTICATED = 64
"""At most so many connections are open that have not proven yet that they know the key."""
_AUTHENTICATION_SECONDS = 5.0
_LISTENS_AGAIN_SECONDS = 0.1
_ADDRESS, _KEY = "_COORDD_FUNCTION_ADDRESS", "_COORDD_FUNCTION_KEY"


def pickled(thing: Any) -> bytes:
    """Pickles a function or its result, by cloudpickle where that is installed."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(thing)
    return bytes(cloudpickle.dumps(thing))


def connect() -> Connection:
    """Connects a rank with the process that has called `horovod.run`."""
    host, _, port = os.environ[_ADDRESS].rpartition(":")
    address: Any = (host, int(port)) if host else port
    return Client(address, authkey=bytes.fromhex(os.environ[_KEY]))


class Exchange:
    """The caller's side."""

    def __init__(self, work: bytes, path: Sequence[str], *, remote: bool) -> None:
        """Listens for ranks.

        Args:
            work: the pickled function and its arguments.
            path: where ranks look for modules, too.
            remote: whether ranks may be on other hosts; if not, no other user can connect.
        """
        self._message = (work, list(path))
        self._key = secrets.token_bytes(32)
        self._folder = tempfile.TemporaryDirectory(prefix="coordd-")
        place: Any = ("", 0) if remote else str(Path(self._folder.name, "s"))
        self._listener = Listener(place, backlog=128)
        self._found: dict[int, tuple[bool, bytes]] = {}
        self._failed: list[int] = []
        self._room = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="horovod.run", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.close()
        self._folder.cleanup()

    @property
    def variables(self) -> dict[str, str]:
        """What ranks need in their environment."""
        at: Any = self._listener.address
        address = f"{socket.gethostname()}:{at[1]}" if isinstance(at, tuple) else f":{at}"
        return {_ADDRESS: address, _KEY: self._key.hex()}

    def results(self, size: int, status: int) -> list[Any]:
        """Returns what the ranks have brought.

        Raises:
            RuntimeError: a rank has failed, or brought nothing.
        """
        for rank in self._failed:
            text = f"horovod.run: the function failed on rank {rank}\n{self._found[rank][1].decode()}"
            raise RuntimeError(text)
        missing = [rank for rank in range(size) if rank not in self._found]
        if status or missing:
            text = f"horovod.run: the job ended with exit code {status}, and without results of ranks {missing}"
            raise RuntimeError(text)
        return [pickle.loads(self._found[rank][1]) for rank in range(size)]  # noqa: S301 - of this job's ranks

    def _accept(self) -> None:
        while not self._over.is_set():
            self._room.acquire()
            try:
                connection = self._listener.accept()
            except OSError:  # closed, or there is no descriptor just now
                self._room.release()
                self._over.wait(_LISTENS_AGAIN_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Serves one rank; what does not know the key, or ends early, brings no result."""
        with connection:
            try:
                self._meet(connection)
                connection.send(self._message)
                rank, well, result = connection.recv()
            except (OSError, EOFError, AuthenticationError):
                return
            self._found[rank] = well, result
            self._failed += [] if well else [rank]
            connection.send(None)  # it is kept, so the rank may end

    def _meet(self, connection: Connection) -> None:
        """Does what a Listener would, during which others would wait, and for as long as the other end likes."""
        try:
            _limit_waits(connection, _AUTHENTICATION_SECONDS)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _limit_waits(connection, 0.0)
        finally:
            self._room.release()


def _limit_waits(connection: Connection, seconds: float) -> None:
    """Has reads of a connection fail after so long; 0 is without limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), 0))
