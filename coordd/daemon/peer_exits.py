"""Processes of neighbours that are gone, and the events that wait for that. Other threads see only their events."""

from __future__ import annotations

import threading

__all__ = ["Departures"]


class Departures:
    """The departed processes that one rank has seen."""

    def __init__(self) -> None:
        self._gone: set[int] = set()
        self._watched: list[tuple[int, threading.Event]] = []

    def note(self, rank: int) -> None:
        """Notes that the process of a rank is gone, and sets the events that wait for it."""
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
        """Sets all events: no further departure will be noticed."""
        for _, gone in self._watched:
            gone.set()
