"""Ties a process to the one that started it, so that not even SIGKILL leaves something behind.

Two knots, because each covers what the other cannot. `die_with_parent` asks the kernel for a signal when the parent
dies; it is Linux's own and covers one process. `Guard` is a fork that sleeps on a pipe whose other end only we hold;
it wakes when we die of anything, and then ends our command's whole process group.
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
    """Has the kernel send this process a signal when its parent dies, on Linux.

    Args:
        number: the signal.
        parent: process id of the parent, to notice one that died before the kernel was asked.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def signal_group(group: int, number: int) -> None:
    """Signals every process of a group, if any is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # gone; or, on macOS, only zombies are left
        return


class Guard:
    """A forked process that outlives this one just long enough to end a process group.

    It lies in a session of its own, so that whatever ends us does not reach it first.
    """

    def __init__(self, group: int, farewell: Callable[[], None]) -> None:
        """Forks.

        Args:
            group: the process group to end when this process dies without a word.
            farewell: called by the guard after that, to report it.
        """
        watched, self._lifeline = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._lifeline)
            self._watch(watched, group, farewell)
        os.close(watched)

    def dismiss(self) -> None:
        """Ends the guard; the group is left alone."""
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
        os.closerange(3, watched)  # our command's pipes: holding them would keep their readers waiting
        os.closerange(watched + 1, 1024)
        if os.read(watched, 1) != _DISMISSED:
            signal_group(group, signal.SIGKILL)
            farewell()
        os._exit(0)
