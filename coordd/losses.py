"""Who is gone, and who waits to hear of it."""

from __future__ import annotations

import threading

__all__ = ["Losses"]


class Losses:
    """The ranks whose connection has closed, as one daemon has seen it."""

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._watched: list[tuple[int, threading.Event]] = []

    def watch(self, rank: int, gone: threading.Event) -> None:
        """Sets ``gone`` once a rank is gone, or nobody looks any more."""
        self._watched.append((rank, gone))
        if rank in self._lost:
            gone.set()

    def note(self, rank: int) -> None:
        """Notes that a rank is gone, and tells those who wait for that."""
        self._lost.add(rank)
        for watched, gone in self._watched:
            if watched == rank:
                gone.set()

    def end(self) -> None:
        """Looks no more."""
        for _, gone in self._watched:
            gone.set()
