"""Closes or replaces what forked children must not keep: a connection lives as long as any process has it open.

A data loader's worker that outlives its rank would otherwise keep that rank's connections open, and the other ranks
would not notice that the rank has died. Programs started with `exec` inherit none, because all are close-on-exec.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["Inherited", "close_in_children", "close_sockets", "forks"]

_DESCRIPTORS = "/proc/self/fd"


class Inherited(Protocol):
    """An object with descriptors that a forked child closes, or with memory that the child must not share."""

    def close_in_child(self) -> None:
        """Closes the child's copies, or makes new ones; runs in the child, which has no other thread."""
        ...


_owners: weakref.WeakSet[Inherited] = weakref.WeakSet()
_forks = 0


def close_in_children(owner: Inherited) -> None:
    """Makes every child that Python forks from now on close the descriptors of ``owner``, while ``owner`` lives."""
    _owners.add(owner)


def forks() -> int:
    """Returns how often Python has forked this process."""
    return _forks


def close_sockets(is_ours: Callable[[socket.socket], bool]) -> None:
    """Closes the sockets of this process for which ``is_ours`` returns True.

    libzmq hides the descriptors of its connections, and creates them on its own thread, so they are found by their
    addresses.
    """
    if not os.path.isdir(_DESCRIPTORS):  # noqa: PTH112 - runs in every forked child; pathlib is slower
        return
    limit = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # a timeout would make a wrapped socket non-blocking, in the parent as well
    try:
        for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - as above
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                if stat.S_ISSOCK(os.fstat(descriptor := int(name)).st_mode):
                    _close_if(is_ours, descriptor)
    finally:
        socket.setdefaulttimeout(limit)


def _close_if(is_ours: Callable[[socket.socket], bool], descriptor: int) -> None:
    found = socket.socket(fileno=descriptor)
    try:
        ours = is_ours(found)
    except OSError:  # not connected
        ours = False
    if ours:
        found.close()
    else:
        found.detach()


def _close_inherited() -> None:
    for owner in list(_owners):
        owner.close_in_child()


def _count_fork() -> None:
    global _forks  # noqa: PLW0603 - a counter of the process; `os.register_at_fork` passes no object to keep it in
    _forks += 1


os.register_at_fork(after_in_parent=_count_fork, after_in_child=_close_inherited)
