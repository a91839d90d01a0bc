"""The user's command as a child process, in a session of its own.

One rule: the child is reaped only after its process group was killed. Until then the kernel cannot reuse its process
id, so the id of the group is certain to mean the group that this process started.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Never

from coordd.launch.process_guard import die_with_parent, signal_group

__all__ = ["Child", "End"]

_NOT_FOUND, _NOT_STARTED = 127, 126  # exit codes, as in shells

_SHELLS = {b"sh", b"bash", b"dash", b"zsh", b"ksh", b"mksh", b"fish", b"csh", b"tcsh", b"busybox"}

End = tuple[int, int]  # exit code and signal, one of them 0


class Child:
    """A running command; its output is read from the descriptors ``out`` and ``err``."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        cpus: Iterable[int] = (),
        reset: Iterable[int] = (),
    ) -> None:
        """Starts the command.

        Args:
            argv: program and arguments; the program is looked up on ``PATH``.
            environment: the command's whole environment.
            cpus: hardware threads that the command is bound to; empty for any.
            reset: signals whose default action is restored for the command.
        """
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        parent = os.getpid()
        self._buried = False
        self.pid = os.fork()
        if self.pid == 0:
            _detach(parent, cpus, reset)
            os.dup2(out, 1)
            os.dup2(err, 2)
            _become(argv, environment)
        os.close(out)
        os.close(err)

    def end(self) -> End | None:
        """Returns how the command ended, or ``None`` while it runs. The process stays a zombie until `bury`."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return (found.si_status, 0) if found.si_code == os.CLD_EXITED else (0, found.si_status)

    def tell(self, number: int) -> None:
        """Sends a signal to the command's process only."""
        if not self._buried:
            os.kill(self.pid, number)

    def ask(self, number: int) -> None:
        """Sends a termination request: to the command's process only if it handles the signal, else to its group.

        A command that handles the signal may continue for a moment and needs its helpers, such as data loaders. A
        shell only waits for the processes that it runs, so they must get the signal too, even if the shell has a trap.
        """
        if self._buried or _is_shell(self.pid) or not _handles(self.pid, number):
            self.tell_all(number)
        else:
            self.tell(number)
            signal_group(self.pid, signal.SIGCONT)

    def tell_all(self, number: int) -> None:
        """Sends a signal to the command's process group, and continues stopped processes of it."""
        if not self._buried:
            signal_group(self.pid, number)
            signal_group(self.pid, signal.SIGCONT)

    def bury(self) -> None:
        """Kills the remaining processes of the command's group, then reaps the command."""
        signal_group(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._buried = True


def _is_shell(pid: int) -> bool:
    with open(f"/proc/{pid}/comm", "rb") as name:  # noqa: PTH123 - importing pathlib takes long here
        return name.read().strip() in _SHELLS


def _handles(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    with open(f"/proc/{pid}/status", "rb") as lines:  # noqa: PTH123 - as above
        caught = next(line for line in lines if line.startswith(b"SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _detach(parent: int, cpus: Iterable[int], reset: Iterable[int]) -> None:
    """Starts a new session in the forked process, resets its signal handlers and binds it to ``cpus``."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (*reset, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two; children would inherit that
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL, parent)
    if (wanted := set(cpus)) and sys.platform == "linux":
        os.sched_setaffinity(0, wanted)


def _become(argv: Sequence[str], environment: Mapping[str, str]) -> Never:
    try:
        os.execvpe(argv[0], list(argv), dict(environment))  # noqa: S606 - no shell is what we want
    except OSError as error:
        hint = f"; did you mean: python {argv[0]}" if argv[0].endswith(".py") else ""
        os.write(2, f"coordd: cannot start {argv[0]!r}: {error.strerror}{hint}\n".encode())
        os._exit(_NOT_FOUND if error.errno == errno.ENOENT else _NOT_STARTED)
