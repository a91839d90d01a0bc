"""The status server of a rank: a thread that sleeps on a socket and costs nothing until a query arrives.

It answers even while the daemon's thread or the main thread is stuck, unless the stuck thread holds the GIL.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from coordd.daemon.daemon import Daemon
from coordd.daemon.snapshot import Witness
from coordd.daemon.wakeup import Bell
from coordd.host.fork import close_in_children
from coordd.monitoring.stacks import THREAD
from coordd.monitoring.status.address import FAR_SECONDS, Address, listed, peer
from coordd.monitoring.status.report import Question, Standing
from coordd.ops.messages import Account, Inquiry

__all__ = ["Desk"]

log = logging.getLogger("coordd")

_SLOW_SECONDS = 1.0
_LONGEST_QUESTION = 1 << 20
_BACKLOG = 64
_STEP = 0.2


class Desk:
    """The status server of one daemon; answers processes of the same user, and other ranks."""

    def __init__(self, daemon: Daemon, address: Address) -> None:
        """Opens the socket and starts the thread.

        Args:
            daemon: the daemon whose status is served.
            address: address of this rank; `settle` also uses the next ``turn``.
        """
        self._daemon = daemon
        self._witness = Witness(daemon.status, rank=address.rank, size=address.size)
        self._numbers = itertools.count(1)
        self._asked: deque[Inquiry] = deque()
        self._answered: deque[Account] = deque(maxlen=4096)
        self._closing = False
        self._failing = False
        self._bell = Bell()
        self._address = address
        self._sockets: list[socket.socket] = []
        self._listen()
        close_in_children(self)
        self._thread = threading.Thread(target=self._run, name=f"{THREAD} desk", daemon=True)
        daemon.status.desk = self._notify
        daemon.status.absent = self._absent
        self._thread.start()

    def settle(self) -> None:
        """Publishes the final address, with rank and size, once the rank has connected to the others."""
        world = self._daemon.world
        self._address = self._address._replace(turn=self._address.turn + 1, met=1, rank=world.rank, size=world.size)
        self._listen()
        self._bell.ring()

    def close(self) -> None:
        """Stops the server."""
        self._closing = True
        self._bell.ring()
        self._thread.join(_SLOW_SECONDS)

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the sockets: the kernel lists a socket while any process holds it."""
        for listener in self._sockets:
            listener.close()

    def _absent(self) -> list[int]:
        """Returns the ranks of this job that have no status server on this host, ascending."""
        if not self._sockets:
            return []
        present = {found.rank for found in listed() if found.job == self._address.job}
        return sorted(set(range(self._address.size)) - present)

    def _listen(self) -> None:
        """Opens the socket of the present address; an earlier one stays open, because a query may be pending there."""
        try:
            listener = socket.socket(socket.AF_UNIX)
        except OSError as error:
            log.warning("`coordd status` will not find this rank: %s", error)
            return
        try:
            listener.bind(self._address.name)
        except OSError as error:
            listener.close()
            log.warning("`coordd status` will not find this rank: %s", error)
            return
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._sockets.append(listener)
        self._bell.watch([listener.fileno()])

    def _notify(self, message: Inquiry | Account) -> None:
        """Queues a query or an answer from another rank; called on the daemon's thread."""
        if isinstance(message, Inquiry):
            self._asked.append(message)
        else:
            self._answered.append(message)
        self._bell.ring()

    def _run(self) -> None:
        while not self._closing:
            self._bell.sleep(None)
            try:
                self._serve()
            except Exception:  # the next query may succeed
                if not self._failing:
                    log.exception("`coordd status` gets no answer")
                self._failing = True
                time.sleep(_STEP)  # if no file descriptor is left to accept a connection, it wakes this thread at once
            else:
                self._failing = False
        for listener in self._sockets:
            listener.close()

    def _serve(self) -> None:
        self._answer_ranks()
        for listener in tuple(self._sockets):
            self._receive(listener)

    def _receive(self, listener: socket.socket) -> None:
        """Accepts and answers the next query on a socket, if there is one."""
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the client may disconnect
                connection.settimeout(_SLOW_SECONDS)
                if peer(connection)[1] == os.geteuid():
                    connection.sendall(msgspec.json.encode(self._answer(connection)))

    def _answer_ranks(self) -> None:
        """Answers the queries that arrived through the control channel."""
        while self._asked:
            asked = self._asked.popleft()
            told = msgspec.json.encode(self._witness.standing())
            rank = self._daemon.world.rank
            self._daemon.say(Account(rank, number=asked.number, asker=asked.asker, answer=told))

    def _answer(self, connection: socket.socket) -> list[Standing]:
        question = msgspec.json.decode(_line(connection), type=Question)
        if question.ranks:
            return self._ask(question.ranks)
        status = self._daemon.status
        own = self._witness.standing()
        return [msgspec.structs.replace(own, hosts=status.world.hosts if status.pids else (), pids=status.pids)]

    def _ask(self, ranks: Sequence[int]) -> list[Standing]:
        """Queries other ranks through the coordinator; ranks that do not answer in time are missing in the result."""
        number = next(self._numbers)
        found: dict[int, Standing] = {}
        deadline = time.monotonic() + FAR_SECONDS
        self._answered.clear()
        self._daemon.say(Inquiry(tuple(ranks), number, self._daemon.world.rank))
        while len(found) < len(set(ranks)) and (left := deadline - time.monotonic()) > 0:
            self._bell.sleep(min(left, _STEP))
            self._answer_ranks()
            while self._answered:
                account = self._answered.popleft()
                if account.number == number:
                    found[account.rank] = msgspec.json.decode(account.answer, type=Standing)
        return [found[rank] for rank in sorted(found)]


def _line(connection: socket.socket) -> bytes:
    """Reads a query, which is one line."""
    data = b""
    while not data.endswith(b"\n"):
        chunk = connection.recv(1 << 16)
        if not chunk or len(data) > _LONGEST_QUESTION:
            raise ConnectionError
        data += chunk
    return data
