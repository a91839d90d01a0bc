"""How the daemon sleeps and who wakes it."""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Sequence

__all__ = ["Bell"]

_SELECT_LIMIT = 1024
_SHORT = 0.005


class Bell:
    """A sleeper that any thread may wake, and that the network wakes too.

    A ring is never lost: one that comes before the sleep ends it at once.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._watched = [self._read]
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._rung = self._asleep = False
        # Not in `close`: a ring on another thread may be about to write, and the number may be another file's by then.
        weakref.finalize(self, _free, self._read, self._write).atexit = False

    @property
    def descriptor(self) -> int:
        """Writing a byte here wakes the sleeper, too; for other processes, who open it through ``/proc``."""
        return self._write

    def watch(self, descriptors: Sequence[int]) -> None:
        """Lets these file descriptors wake the sleeper too."""
        for descriptor in descriptors:
            self._watched.append(descriptor)
            self._poll.register(descriptor, select.POLLIN)

    def ring(self) -> None:
        """Wakes the sleeping thread.

        Writes nothing if the bell has been rung already, or if that thread is awake, for it reads the flag first.
        """
        if not self._rung:
            # No call between flag and byte: a signal's handler that raises there would leave a flag without a ring.
            self._rung = True
            try:
                if self._asleep:
                    os.write(self._write, b"!")
            except BlockingIOError:  # full of neighbours' rings, each of which wakes it
                pass
            except BaseException:
                self._rung = False
                raise

    def sleep(self, seconds: float | None) -> None:
        """Sleeps until rung, until a watched descriptor is readable, or for ``seconds``; None is without limit."""
        self._asleep = True  # before the look at the other flag, which `ring` sets before it looks at this one
        try:
            ended = self._rung or self._wait(seconds)
        finally:
            self._asleep = False
        if ended:
            # Cleared before draining: a ring in between leaves the flag set, and the next sleep ends at once.
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 64)

    def _wait(self, seconds: float | None) -> bool:
        """Waits for the descriptors; says whether it was the bell.

        That has to be asked even if the flag says no: a ring whose flag was seen already may write only now.
        """
        if seconds is not None and seconds < _SHORT and max(self._watched) < _SELECT_LIMIT:
            return self._read in select.select(self._watched, (), (), seconds)[0]  # poll() rounds up to milliseconds
        ready = self._poll.poll(None if seconds is None else seconds * 1e3)
        return any(descriptor == self._read for descriptor, _ in ready)

    def close(self) -> None:
        """Says that nobody sleeps any more; the descriptors are freed with the last reference."""
        self._rung = True


def _free(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
