"""What one optimizer has given to the daemon, and waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from coordd.errors import CoorddError, is_deadlock, note_heard
from coordd.handles import Handle, check_may_wait, hear_of
from coordd.table import Entry, Site
from coordd_torch.channel import Channel

__all__ = ["Told", "Underway"]


class _Landing(Handle[None]):
    """That everything has landed: what a thread waits for, made only where one has to."""

    __slots__ = ("_underway",)

    def __init__(self, underway: Underway) -> None:
        super().__init__("gradients", underway.channel.daemon.hurry, underway.channel.daemon.note_broken_wait)
        self._underway = underway

    def waits_for(self, promise: object) -> bool:
        """Says whether it is not done before this one is."""
        return getattr(promise, "underway", None) is self._underway


class Underway:
    """Counts gradients, buckets and rounds that are reduced, and keeps the first error.

    Attributes:
        channel: the way that they take.
        site: the line of the user's script for which they are reduced.
        failed: why one of them has failed.
        lost: those that have failed because ranks have waited for each other.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.site: Site = None
        self.failed: BaseException | None = None
        self.lost: list[object] = []
        self._unheard: list[BaseException] = []
        # Each counter has one writer, so they need no lock: this thread starts, the daemon's lands.
        self._started = 0
        self._landed = 0
        self._lock = threading.Lock()
        self._awaited: _Landing | None = None

    def submit(self, entry: Entry, *, lazy: bool = False) -> None:
        """Announces one of them; ``lazy`` if this thread calls `wait` next."""
        try:
            self._started += 1
            self.channel.daemon.submit(entry, lazy=lazy)
        except CoorddError:
            self._started -= 1
            raise
        except BaseException as error:  # a signal's handler has raised: whether it is submitted is not known
            self.channel.daemon.broken_off(error, "the submission of gradients")
            raise

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:
        """Takes over what has arrived; on the daemon's thread."""
        try:
            if convert is not None:
                convert(value)
        except BaseException as error:  # noqa: BLE001 - the thread that waits gets it
            self.failed = self.failed or error
        self.landed()

    def fail(self, error: BaseException, promise: object = None) -> None:
        """Notes the first failure, of this promise; on the daemon's thread."""
        if is_deadlock(error):
            self._unheard.append(error)
            self.lost.append(promise)
        self.failed = self.failed or error
        self.landed()

    def landed(self) -> None:
        """Counts what is done, one way or another; on the daemon's thread."""
        self._landed += 1
        if self._awaited is not None and self._landed == self._started:
            awaited, self._awaited = self._awaited, None
            awaited.resolve(None)

    def wait(self) -> None:
        """Waits until everything that was started is done.

        Raises:
            DeadlockError: it is not, and this is the daemon's thread.
        """
        while self._landed < self._started:
            check_may_wait("waiting for gradients")
            with self._lock:
                awaited = self._awaited
                if awaited is None:
                    awaited = self._awaited = _Landing(self)
            # The order matters: either this look sees the last one land, or that sees what is awaited.
            if self._landed < self._started:
                awaited.wait()

    def take_lost(self) -> list[object]:
        """Returns what ranks have lost because they have waited for each other, and forgets that it has failed.

        The script hears of it now, if it has not had an error of this step before.
        """
        while self._unheard:
            note_heard(self._unheard.pop())
        found = [self.lost.pop() for _ in range(len(self.lost))]  # the daemon's thread may add to it
        if found:
            self.failed = None
        return found

    def settle(self) -> None:
        """Waits for what was started; raises the error of what has failed."""
        self.wait()
        error, self.failed = self.failed, None
        if error is not None:
            raise error


class Told:
    """What a rank tells the others of a step that it discards."""

    def __init__(self) -> None:
        self._told: list[tuple[Callable[[], Handle[Any]], Handle[Any]]] = []

    def tell(self, start: Callable[[], Handle[Any]]) -> None:
        """Starts to tell something."""
        handle = start()
        handle.add_done_callback(hear_of)  # if it fails, this rank has told of a worse error
        self._told.append((start, handle))

    def tell_again(self) -> None:
        """Tells what the others have not heard because ranks have waited for each other."""
        told, self._told = self._told, []
        for start, handle in told:
            if handle.lost:
                self.tell(start)
            else:
                self._told.append((start, handle))

    def wait(self) -> BaseException | None:
        """Waits until all is told; returns the error if ranks have waited for each other."""
        for _, handle in self._told:
            handle.wait()
        return next((handle.error() for _, handle in self._told if handle.lost), None)

    def forget(self) -> None:
        """Gets ready for the next step."""
        self._told.clear()
