"""The message queue: framework threads put work into it for the daemon's thread.

It implements the batching window: the reader gets the work when the window is over, when there is enough of it, or at
once when a thread waits for it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from typing import Generic, TypeVar

from coordd.daemon.wakeup import Bell

__all__ = ["Inbox"]

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue with many writers and one reader, which sleeps until it is woken up."""

    def __init__(self, bell: Bell, *, window: float, limit: float = math.inf) -> None:
        """Creates an empty queue.

        ``awaited`` is whether the last items taken skipped the window; ``waited`` is whether a thread had begun to wait
        just before the last `take`.

        Args:
            bell: wakes the reader.
            window: the batching window, in seconds, counted from when the reader finds the first item.
            limit: weight of the items that ends the window early.
        """
        self._bell = bell
        self.window = window
        self._limit = limit
        self._weight = 0
        self._items: deque[Item] = deque()
        self._hurried = False
        self._waiting = False
        self._deep = False
        self._end: float | None = None
        self.awaited = False
        self.waited = False

    def __bool__(self) -> bool:
        return bool(self._items)

    def look(self) -> list[Item]:
        """Lists the items without taking them.

        Raises:
            RuntimeError: they have changed meanwhile; call it again.
        """
        return list(self._items)

    def put(self, item: Item, weight: int = 0, *, wake: bool = True) -> None:
        """Adds an item; wakes the reader only from deep sleep, because in the window it wakes up by itself.

        Without ``wake``, the writer calls `hurry` next.
        """
        self._items.append(item)
        self._weight += weight
        if wake and (self._deep or self._weight >= self._limit):
            self._bell.ring()

    def slip(self, item: Item, *, wake: bool) -> None:
        """Adds an item that skips the window; without ``wake`` the reader takes it when something else wakes it."""
        self._items.append(item)
        self._hurried = True
        if wake:
            self._bell.ring()

    def hurry(self, *, waiting: bool = True) -> None:
        """Ends the window; by default because a thread waits for an item of the queue."""
        self._waiting |= waiting
        self._hurried = True
        self._bell.ring()

    def take(self) -> list[Item]:
        """Returns the items if the window is over or a thread waits, else nothing; for the reader."""
        # The flag is read before the items: a writer adds first and then calls `hurry`, so no call is lost.
        hurried, self._hurried = self._hurried, False
        self.waited, self._waiting = self._waiting, False
        if hurried or self._items:
            self.awaited = hurried
        if not self._items:
            return []
        if not hurried and self._weight < self._limit:
            now = time.monotonic()
            if self._end is None:
                self._end = now + self.window
            if now < self._end:
                return []
        self._end = None
        self._weight = 0
        return [self._items.popleft() for _ in range(len(self._items))]

    def drain(self) -> list[Item]:
        """Returns all items regardless of the window; for the shutdown, where several threads may call it at once."""
        found = []
        with contextlib.suppress(IndexError):  # a count taken first could include items that another thread takes
            while True:
                found.append(self._items.popleft())
        return found

    def sleep(self, seconds: float | None) -> None:
        """Sleeps until there is something to take, a wake-up, or ``seconds`` have passed; for the reader."""
        if self._items:
            if not self._hurried and self._weight < self._limit:
                self._bell.sleep(max(0.0, (self._end or 0.0) - time.monotonic()))
            return
        self._deep = True
        if not self._items:
            self._bell.sleep(seconds)
        self._deep = False
