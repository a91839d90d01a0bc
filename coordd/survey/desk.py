"""Where a rank answers questions: a thread that sleeps on a socket, and costs nothing until somebody asks.

It answers while the daemon's thread is stuck, and while the main thread is, unless that keeps Python's lock.
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

from coordd.account import THREAD
from coordd.bell import Bell
from coordd.daemon import Daemon
from coordd.forks import close_in_children
from coordd.messages import Account, Inquiry
from coordd.survey.address import FAR_SECONDS, Address, listed, peer
from coordd.survey.standing import Question, Standing
from coordd.survey.witness import Witness

__all__ = ["Desk"]

log = logging.getLogger("coordd")

_SLOW_SECONDS = 1.0
_LONGEST_QUESTION = 1 << 20
_BACKLOG = 64
_STEP = 0.2


class Desk:
    """Answers for one daemon: to processes of its user, and to other ranks."""

    def __init__(self, daemon: Daemon, address: Address) -> None:
        """Opens the desk.

        Args:
            daemon: for whom it answers.
            address: where it is found; the next ``turn`` is used, too.
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
        """Says at which rank it stands, once that has met the others."""
        world = self._daemon.world
        self._address = self._address._replace(turn=self._address.turn + 1, met=1, rank=world.rank, size=world.size)
        self._listen()
        self._bell.ring()

    def close(self) -> None:
        """Answers no more."""
        self._closing = True
        self._bell.ring()
        self._thread.join(_SLOW_SECONDS)

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the sockets: the kernel lists them as long as any process has them."""
        for listener in self._sockets:
            listener.close()

    def _absent(self) -> list[int]:
        """Lists the ranks of this job that have no desk on this host."""
        if not self._sockets:
            return []
        present = {found.rank for found in listed() if found.job == self._address.job}
        return sorted(set(range(self._address.size)) - present)

    def _listen(self) -> None:
        """Opens the socket of the present address; a former one stays open, for somebody may be asking there."""
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
        """Takes a question of another rank, or an answer; on the daemon's thread."""
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
            except Exception:  # the next one who asks may fare better
                if not self._failing:
                    log.exception("`coordd status` gets no answer")
                self._failing = True
                time.sleep(_STEP)  # no file descriptor is left to accept the caller, which asks again at once
            else:
                self._failing = False
        for listener in self._sockets:
            listener.close()

    def _serve(self) -> None:
        self._answer_ranks()
        for listener in tuple(self._sockets):
            self._receive(listener)

    def _receive(self, listener: socket.socket) -> None:
        """Serves the next of those who want to ask in person."""
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # who asks may go away
                connection.settimeout(_SLOW_SECONDS)
                if peer(connection)[1] == os.geteuid():
                    connection.sendall(msgspec.json.encode(self._answer(connection)))

    def _answer_ranks(self) -> None:
        """Answers those who have asked through the control channel."""
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
        """Asks other ranks by way of the coordinator; those that do not answer in time are not in the result."""
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
    """Reads a question, which ends with the line."""
    data = b""
    while not data.endswith(b"\n"):
        chunk = connection.recv(1 << 16)
        if not chunk or len(data) > _LONGEST_QUESTION:
            raise ConnectionError
        data += chunk
    return data
