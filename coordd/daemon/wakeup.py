"""Wake-up: how the daemon's thread sleeps, and how other threads and processes wake it."""

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
    """A sleep that any thread, or a readable file descriptor such as the network's, can end.

    A wake-up is never lost: one that precedes the sleep ends it at once.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._watched = [self._read]
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._rung = self._asleep = False
        # Not in `close`: another thread in `ring` may be about to write, and the number may be another file's by then.
        weakref.finalize(self, _free, self._read, self._write).atexit = False

    @property
    def descriptor(self) -> int:
        """File descriptor whose write end other processes open through ``/proc``; writing a byte wakes the sleeper."""
        return self._write

    def watch(self, descriptors: Sequence[int]) -> None:
        """Adds file descriptors that end the sleep when readable."""
        for descriptor in descriptors:
            self._watched.append(descriptor)
            self._poll.register(descriptor, select.POLLIN)

    def ring(self) -> None:
        """Wakes the sleeping thread.

        Writes nothing if a wake-up is pending already or if that thread is awake, because it reads the flag before it
        sleeps.
        """
        if not self._rung:
            # No call between flag and byte: a signal handler that raises there would leave the flag set without a byte.
            self._rung = True
            try:
                if self._asleep:
                    os.write(self._write, b"!")
            except BlockingIOError:  # full of other processes' wake-ups, each of which wakes the thread
                pass
            except BaseException:
                self._rung = False
                raise

    def sleep(self, seconds: float | None) -> None:
        """Sleeps until `ring`, until a watched descriptor is readable, or for ``seconds``; None means no limit."""
        self._asleep = True  # set before reading the other flag, which `ring` sets before reading this one
        try:
            ended = self._rung or self._wait(seconds)
        finally:
            self._asleep = False
        if ended:
            # Cleared before draining: a `ring` in between leaves the flag set, and the next sleep ends at once.
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 64)

    def _wait(self, seconds: float | None) -> bool:
        """Waits for the descriptors; returns whether the wake-up pipe is readable.

        The caller needs this even if the flag is clear: a `ring` whose flag was already read may write only now.
        """
        if seconds is not None and seconds < _SHORT and max(self._watched) < _SELECT_LIMIT:
            return self._read in select.select(self._watched, (), (), seconds)[0]  # poll() rounds up to milliseconds
        ready = self._poll.poll(None if seconds is None else seconds * 1e3)
        return any(descriptor == self._read for descriptor, _ in ready)

    def close(self) -> None:
        """Marks that no thread sleeps any more; the descriptors are freed with the last reference."""
        self._rung = True


def _free(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
