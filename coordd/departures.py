"""Which neighbours' processes are gone, and who waits for that. Other threads see only their events."""

from __future__ import annotations

import threading

__all__ = ["Departures"]


class Departures:
    """Seen by one rank."""

    def __init__(self) -> None:
        self._gone: set[int] = set()
        self._watched: list[tuple[int, threading.Event]] = []

    def note(self, rank: int) -> None:
        """Notes that the process of a rank is gone, and tells those who wait for that."""
        self._gone.add(rank)
        for watched, gone in self._watched:
            if watched == rank:
                gone.set()

    def watch(self, rank: int, gone: threading.Event) -> None:
        """Sets ``gone`` once the process of a rank is gone."""
        self._watched.append((rank, gone))
        if rank in self._gone:
            gone.set()

    def end(self) -> None:
        """Lets all go who wait: nobody will see anything any more."""
        for _, gone in self._watched:
            gone.set()
