"""Watches the memory of this process: its proportional set size, in which pages in common count by their share."""

from __future__ import annotations

import threading
from pathlib import Path

__all__ = ["Watch", "proportional_bytes"]

_EVERY_SECONDS = 10e-3


class Watch(threading.Thread):
    """Samples the proportional set size until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            self.peak = max(self.peak, proportional_bytes())

    def stop(self) -> int:
        """Ends it, and returns the highest sample."""
        self._over.set()
        self.join()
        return max(self.peak, proportional_bytes())


def proportional_bytes() -> int:
    """What this process has now.

    Raises:
        RuntimeError: the system does not tell.
    """
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not tell a process's proportional set size")
