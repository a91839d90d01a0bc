"""Pending work: the operations of one optimizer that the daemon has not completed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coordd.errors import CoorddError, is_deadlock, note_heard
from coordd.negotiation.tensor_table import Entry, Site
from coordd.ops.handles import Handle, check_may_wait, hear_of
from coordd_torch.communication import Channel

__all__ = ["Told", "Underway"]


class _Landing(Handle[None]):
    """Handle that resolves when all pending work is done; created only if a thread has to wait."""

    __slots__ = ("_underway",)

    def __init__(self, underway: Underway) -> None:
        super().__init__("gradients", underway.channel.daemon.hurry, underway.channel.daemon.note_broken_wait)
        self._underway = underway

    def waits_for(self, promise: object) -> bool:
        """Returns whether this handle waits for the operation of another handle."""
        return getattr(promise, "underway", None) is self._underway


class Underway:
    """Counts the gradients, buckets and rounds that are being reduced, and keeps the first error.

    Attributes:
        channel: communication settings.
        site: the line of the user's script that caused the reductions.
        failed: the first error of a reduction, if any.
        lost: the handles of operations that failed because ranks waited for each other.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.site: Site = None
        self.failed: BaseException | None = None
        self.lost: list[object] = []
        self._unheard: list[BaseException] = []
        self._interrupted = False  # while it submitted an entry, which may never complete
        # Each counter has one writer, so they need no lock: this thread counts starts, the daemon's completions.
        self._started = 0
        self._landed = 0
        # At most one. Operations of a dictionary are atomic; a lock would not do: a signal handler may wait, too.
        self._awaited: dict[None, _Landing] = {}

    def submit(self, entry: Entry, *, lazy: bool = False) -> None:
        """Submits an entry to the daemon; ``lazy`` if this thread calls `wait` next."""
        self.channel.check_in_step()
        try:
            self._started += 1
            self.channel.daemon.submit(entry, lazy=lazy)
        except CoorddError:
            self._started -= 1
            raise
        except BaseException as error:  # a signal handler has raised: it is unknown whether the entry is submitted
            self._interrupted = True
            self.channel.broken_off(error, "the submission of gradients")
            raise

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:
        """Converts the result of a completed operation and counts it; on the daemon's thread."""
        try:
            if convert is not None:
                convert(value)
        except BaseException as error:  # noqa: BLE001 - the waiting thread gets it
            self.failed = self.failed or error
        self.landed()

    def fail(self, error: BaseException, promise: object = None) -> None:
        """Records a failure of the operation of this handle, and counts it; on the daemon's thread."""
        self.failed = self.failed or error
        if is_deadlock(error):
            self._unheard.append(error)
            self.lost.append(promise)  # last: `take_lost` then clears the failure, too
        self.landed()

    def landed(self) -> None:
        """Counts a completed or failed operation; on the daemon's thread."""
        self._landed += 1
        if self._awaited and self._landed == self._started:
            self._awaited.pop(None).resolve(None)

    def wait(self) -> None:
        """Waits until all started operations are done.

        Raises:
            DeadlockError: some are not done, and this is the daemon's thread.
            PeerError: the job has failed, because an exception has interrupted the submission of one.
        """
        if self._interrupted:
            self.channel.check_in_step()
            self.channel.daemon.raise_failure()
        while self._landed < self._started:
            check_may_wait("waiting for gradients")
            awaited = self._awaited.setdefault(None, _Landing(self))
            # The order matters: either this check sees the last completion, or `landed` sees `_awaited`.
            if self._landed < self._started:
                awaited.wait()

    def take_lost(self) -> list[object]:
        """Returns and clears the handles of operations that failed because ranks waited for each other.

        Also clears the failure, and marks the errors as seen by the script.
        """
        while self._unheard:
            note_heard(self._unheard.pop())
        found = [self.lost.pop() for _ in range(len(self.lost))]  # the daemon's thread may add to it
        if found:
            self.failed = None
        return found

    def settle(self) -> None:
        """Waits for all started operations; raises the first error."""
        self.wait()
        error, self.failed = self.failed, None
        if error is not None:
            raise error


class Told:
    """Operations by which a rank notifies the other ranks of a step that it discards."""

    def __init__(self) -> None:
        self._told: list[tuple[Callable[[], Handle[Any]], Handle[Any]]] = []

    def tell(self, start: Callable[[], Handle[Any]]) -> None:
        """Starts an operation."""
        handle = start()
        handle.add_done_callback(hear_of)  # its failure is not logged: this rank has reported a worse error
        self._told.append((start, handle))

    def tell_again(self) -> None:
        """Starts the operations again that failed because ranks waited for each other."""
        told, self._told = self._told, []
        for start, handle in told:
            if handle.lost:
                self.tell(start)
            else:
                self._told.append((start, handle))

    def wait(self) -> BaseException | None:
        """Waits for all operations; returns an error if one failed because ranks waited for each other."""
        for _, handle in self._told:
            handle.wait()
        return next((handle.error() for _, handle in self._told if handle.lost), None)

    def forget(self) -> None:
        """Prepares the next step."""
        self._told.clear()
