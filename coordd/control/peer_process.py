"""Finds which neighbours are processes of this machine, whether they have ended, and where they can connect.

A process id is meaningful only where the same processes are visible: two containers may have equal host names and
separate process ids. So each rank names a descriptor that it has open, and the others look for it in ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

__all__ = ["Ends", "Folder", "Identity"]


class Identity(NamedTuple):
    """A process, and a descriptor that identifies it by its file's device and inode numbers."""

    pid: int
    descriptor: int
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Describes this process, which keeps the descriptor open until the others have checked it."""
        found = os.fstat(descriptor)
        return cls(os.getpid(), descriptor, found.st_dev, found.st_ino)

    @property
    def here(self) -> bool:
        """Whether this is a process of this machine and user that this one can see."""
        try:
            found = Path(f"/proc/{self.pid}/fd/{self.descriptor}").stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


class Ends:
    """Reports when processes end, including processes of other users and of any parent."""

    def __init__(self) -> None:
        self._poll = select.epoll() if hasattr(os, "pidfd_open") else None
        self._ranks: dict[int, int] = {}
        self.descriptor = self._poll.fileno() if self._poll is not None else os.open(os.devnull, os.O_RDONLY)

    def add(self, rank: int, pid: int) -> None:
        """Watches the process of a rank, where the system supports it."""
        if self._poll is None:
            return
        with contextlib.suppress(OSError):  # too many open files, or an old kernel: a closed connection must show it
            descriptor = os.pidfd_open(pid)
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.EPOLLIN)

    @property
    def any(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._ranks and self._poll is not None and self._poll.poll(0))

    def take(self) -> list[int]:
        """Returns the ranks whose processes have ended since the last call, ascending."""
        if not self._ranks or self._poll is None:
            return []
        ended = [descriptor for descriptor, _ in self._poll.poll(0)]
        for descriptor in ended:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        return sorted(self._ranks.pop(descriptor) for descriptor in ended)

    def close(self) -> None:
        """Stops watching."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()
        if self._poll is not None:
            self._poll.close()
        else:
            os.close(self.descriptor)


class Folder:
    """A folder with a name for one socket, which only this user can enter."""

    def __init__(self) -> None:
        """Creates it.

        Raises:
            OSError: there is no writable folder for temporary files.
        """
        self._folder = tempfile.mkdtemp(prefix="coordd-control-")  # mode 0700
        self.path = f"{self._folder}/s"
        try:
            self._descriptor = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def alias(self) -> str:
        """The same path for other processes of this machine, short, and independent of their mounted file systems."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}/s"

    def remove(self) -> None:
        """Removes it; existing connections stay."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._descriptor)
