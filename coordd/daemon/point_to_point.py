"""Sends and receives, by name: matched between two ranks, without negotiation."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from coordd.daemon.blocked_script import Submitter
from coordd.daemon.daemon import Daemon
from coordd.daemon.peer_to_peer import Letter
from coordd.errors import (
    ArgumentError,
    DuplicateNameError,
    ForkedProcessError,
    NotInitializedError,
    PeerError,
    ShutdownError,
    brief,
)
from coordd.negotiation.tensor_table import show_site
from coordd.ops.arguments import check_name, check_rank
from coordd.ops.handles import Handle, call_site, exits, hear_of, raised_by_handler

__all__ = ["UNTOLD", "Land", "Messages"]

UNTOLD = (DuplicateNameError, ForkedProcessError, NotInitializedError, PeerError, ShutdownError)
"""Errors that do not reject the arguments: operations in flight go on, or everything has failed anyway."""

Land = Callable[[np.ndarray], Any]

_LONGEST = 250  # the space that a message's header has


class _Here(threading.local):
    """Marks a thread that sends or receives, and therefore may do so again.

    Attributes:
        posted: the name and the peer of the last message that was handed to the daemon, or is being handed to it; each
            message has a tuple of its own.
    """

    posted: tuple[str, int] = "", -1

    def __init__(self) -> None:
        self.submitter = Submitter()


class Messages:
    """The sends and receives of one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._here = _Here()

    def send(self, array: np.ndarray, destination: int, *, name: str) -> Handle[Any]:
        """Sends to the one rank that receives under this name; needs no negotiation.

        Raises:
            ArgumentError: there is no such rank, or the name is unusable.
        """
        letter = self._letter(array, destination, name, outgoing=True)
        self._here.posted = (name, letter.peer)
        self.daemon.post(letter)
        return letter.handle

    def recv(
        self, array: np.ndarray | None, source: int, *, name: str, land: Land | None = None, lazy: bool = False
    ) -> Handle[Any]:
        """Receives what a rank sends under this name, into ``array`` or, if that is None, into a new array.

        With ``lazy``, the receive may begin as late as when a thread waits for the handle, but it does not wake the
        daemon.

        Raises:
            ArgumentError: there is no such rank, or the name is unusable.
        """
        letter = self._letter(array, source, name, outgoing=False, land=land)
        self._here.posted = (name, letter.peer)
        self.daemon.post(letter, lazy=lazy)
        return letter.handle

    @contextmanager
    def refusing(self, peer: int, name: str, *, outgoing: bool) -> Iterator[None]:
        """Reports that this rank does not send or receive, if the block raises an error.

        The peer's receive fails then, or its message is dropped, so the next message of that name matches the next
        one there. If the peer or the name is unusable, nothing can be reported. A receive that the user's own code
        interrupts, such as a signal handler, has not begun, and its message is left for the next one. If the message is
        being handed to the daemon just then, the job fails.
        """
        before = self._here.posted
        try:
            yield
        except UNTOLD:
            raise
        except BaseException as error:
            trace = error.__traceback__  # begins with this function, which the user's own block may have left
            interrupted = raised_by_handler(trace and trace.tb_next) or not isinstance(error, Exception)
            mine = self._here.posted is not before and self._here.posted == (name, peer)
            unclear = mine or (outgoing and exits(error))
            if unclear and self.daemon.broken_off(error, f"the submission of {name!r}", series=(name, peer)):
                raise
            if not outgoing and interrupted:
                raise
            site = show_site(call_site(sys._getframe(2)))  # noqa: SLF001 - the documented way to the caller
            reason = f"refused to {'send' if outgoing else 'receive'} {name!r} at {site}: {brief(error)}"[:_LONGEST]
            with contextlib.suppress(Exception):  # the script must get the first error
                letter = self._letter(np.empty(0, np.uint8), peer, name, outgoing=outgoing)
                letter.refused = reason
                if not outgoing:
                    letter.array = None
                letter.handle.add_done_callback(hear_of)
                self.daemon.post(letter)
            raise

    def _letter(
        self, array: np.ndarray | None, peer: int, name: str, *, outgoing: bool, land: Land | None = None
    ) -> Letter:
        peer, size = check_rank(peer), self.daemon.world.size
        if not 0 <= peer < size:
            text = f"{name!r}: there is no rank {peer} in a world of {size}"
            raise ArgumentError(text)
        handle = self.daemon.handle(check_name(name), peer=peer)
        _ = self._here.submitter
        return Letter(name, peer, array, handle, outgoing=outgoing, land=land)
