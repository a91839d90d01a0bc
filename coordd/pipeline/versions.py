"""Older versions of a stage's weights, for schedules without a pipeline flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Versions", "Weights"]


class Weights(Protocol):
    """The weights of a stage."""

    def held(self) -> Sequence[Any]:
        """Returns the present values; they stay unchanged after `renew`, whatever happens to the weights."""
        ...

    def put(self, values: Sequence[Any]) -> None:
        """Restores values that `held` returned."""
        ...

    def renew(self) -> None:
        """Moves the weights to new memory; values returned by `held` keep the old memory."""
        ...


class Versions:
    """The versions of a stage's weights after the last few steps; the newest version is the stage's own weights."""

    def __init__(self, weights: Weights, keep: int) -> None:
        """Starts with the present weights as version 0.

        Args:
            weights: weights of the stage.
            keep: number of versions kept at a time, including the newest.
        """
        self._weights = weights
        self._keep = keep
        self._newest = 0
        self._old: dict[int, Sequence[Any]] = {}
        self._shown = 0

    def restart(self) -> None:
        """Renumbers the versions: the newest becomes version 0, older versions get negative numbers."""
        self._old = {version - self._newest: weights for version, weights in self._old.items()}
        self._newest = self._shown = 0

    def clear(self) -> None:
        """Drops all versions but the newest, before an unrelated run."""
        self.show(self._newest)
        self._old.clear()

    def show(self, version: int) -> None:
        """Loads a version into the weights; the oldest one if the requested version is older than all kept ones."""
        wanted = max(version, min([*self._old, self._newest]))
        if wanted == self._shown:
            return
        self._old.setdefault(self._shown, self._weights.held())
        self._weights.put(self._old[wanted])
        self._shown = wanted

    def advance(self) -> None:
        """Starts the next version. The weights get new memory, because autograd graphs refer to the newest's memory."""
        self.show(self._newest)
        self._old[self._newest] = self._weights.held()
        self._weights.renew()
        self._newest += 1
        self._shown = self._newest
        self._old.pop(self._newest, None)
        for version in [version for version in self._old if version <= self._newest - self._keep]:
            del self._old[version]
