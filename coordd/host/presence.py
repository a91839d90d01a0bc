"""Tells the `coordd run` process of a rank whether the rank is between `init` and the end of `shutdown`.

The exit code alone does not show it: a process that calls ``os._exit(0)`` leaves the others as abruptly as one that is
killed. The launcher's process keeps one byte of memory, which the rank opens through ``/proc`` and writes.
"""

from __future__ import annotations

import contextlib
import mmap
import os

__all__ = ["VARIABLE", "Presence", "tell"]

VARIABLE = "_COORDD_PRESENCE"
"""Holds the path of the byte for the rank; processes that the rank starts have no use for it."""

_NEVER, _PRESENT, _AWAY, _ENTERING = b"\0", b"\1", b"\2", b"\3"


class Presence:
    """The launcher's end."""

    def __init__(self) -> None:
        """Creates the byte, where the system has anonymous memory files; elsewhere nothing is known of the rank."""
        self._descriptor = -1
        self._memory: mmap.mmap | None = None  # which a forked process can read after it has closed its descriptors
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("coordd presence", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, 1)
            self._memory = mmap.mmap(self._descriptor, 1)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for the rank."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"} if self._descriptor >= 0 else {}

    @property
    def present(self) -> bool:
        """Whether the rank has called `init` and has not left."""
        return self._told() == _PRESENT

    @property
    def entering(self) -> bool:
        """Whether the rank is in `init`."""
        return self._told() == _ENTERING

    @property
    def never(self) -> bool:
        """Whether the rank has not called `init`."""
        return self._told() == _NEVER

    def _told(self) -> bytes:
        return self._memory[:1] if self._memory is not None else b""


def enter(place: str) -> None:
    """Writes that the rank is in `init`; does nothing like `tell`."""
    _write(place, _ENTERING)


def tell(place: str, *, present: bool) -> None:
    """Writes the byte; the rank's end. Does nothing without a launcher, or where the byte cannot be opened."""
    _write(place, _PRESENT if present else _AWAY)


def _write(place: str, told: bytes) -> None:
    if place:
        with contextlib.suppress(OSError):
            descriptor = os.open(place, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, told)
            finally:
                os.close(descriptor)
