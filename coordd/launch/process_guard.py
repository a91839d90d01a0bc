"""Ends processes when their parent dies, so that not even SIGKILL leaves processes behind.

Two mechanisms, because each covers cases that the other cannot. `die_with_parent` asks the kernel for a signal when the
parent dies; it exists on Linux only and covers one process. `Guard` is a forked process that sleeps on a pipe whose
other end only this process holds; it wakes when this process dies for any reason, and then kills the command's whole
process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

__all__ = ["Guard", "die_with_parent", "signal_group"]

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_DISMISSED = b"."


def die_with_parent(number: int, parent: int) -> None:
    """On Linux, makes the kernel send this process a signal when its parent dies.

    Args:
        number: the signal.
        parent: process id of the parent, to detect a parent that died before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def signal_group(group: int, number: int) -> None:
    """Sends a signal to every process of a process group, if any is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # no process is left or, on macOS, only zombies
        return


class Guard:
    """A forked process that kills a process group when its parent dies.

    It runs in a session of its own, so that signals to this process's group do not reach it.
    """

    def __init__(self, group: int, farewell: Callable[[], None]) -> None:
        """Forks the guard.

        Args:
            group: the process group to kill when this process dies without calling `dismiss`.
            farewell: called by the guard after that, to report it.
        """
        watched, self._lifeline = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._lifeline)
            self._watch(watched, group, farewell)
        os.close(watched)

    def dismiss(self) -> None:
        """Ends the guard without touching the group."""
        os.write(self._lifeline, _DISMISSED)
        os.close(self._lifeline)
        os.waitpid(self._pid, 0)

    @staticmethod
    def _watch(watched: int, group: int, farewell: Callable[[], None]) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.closerange(3, watched)  # the command's pipes: if the guard held them, their readers would see no end
        os.closerange(watched + 1, 1024)
        if os.read(watched, 1) != _DISMISSED:
            signal_group(group, signal.SIGKILL)
            farewell()
        os._exit(0)
