"""Older versions of a stage's weights, for schedules that do not wait until the pipeline is empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Versions", "Weights"]


class Weights(Protocol):
    """The weights of a stage."""

    def held(self) -> Sequence[Any]:
        """What they are now; it stays so, whatever becomes of them after `renew`."""
        ...

    def put(self, values: Sequence[Any]) -> None:
        """Makes them what they were when this was held."""
        ...

    def renew(self) -> None:
        """Gives them new memory: what is held keeps its own."""
        ...


class Versions:
    """The weights after the last few steps; the newest are the stage's own."""

    def __init__(self, weights: Weights, keep: int) -> None:
        """Begins with what is there.

        Args:
            weights: of the stage.
            keep: how many versions there are at a time, the newest included.
        """
        self._weights = weights
        self._keep = keep
        self._newest = 0
        self._old: dict[int, Sequence[Any]] = {}
        self._shown = 0

    def restart(self) -> None:
        """Counts from here on: what was the newest version is version 0, and older ones have negative numbers."""
        self._old = {version - self._newest: weights for version, weights in self._old.items()}
        self._newest = self._shown = 0

    def clear(self) -> None:
        """Forgets all but the newest: what comes next has nothing to do with what was before."""
        self.show(self._newest)
        self._old.clear()

    def show(self, version: int) -> None:
        """Puts a version in place; if there is none so old, the oldest."""
        wanted = max(version, min([*self._old, self._newest]))
        if wanted == self._shown:
            return
        self._old.setdefault(self._shown, self._weights.held())
        self._weights.put(self._old[wanted])
        self._shown = wanted

    def advance(self) -> None:
        """Makes room for the next version: weights get new memory, for graphs know the memory of the newest."""
        self.show(self._newest)
        self._old[self._newest] = self._weights.held()
        self._weights.renew()
        self._newest += 1
        self._shown = self._newest
        self._old.pop(self._newest, None)
        for version in [version for version in self._old if version <= self._newest - self._keep]:
            del self._old[version]
