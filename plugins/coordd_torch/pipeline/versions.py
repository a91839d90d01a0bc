"""Older versions of a stage's weights, for schedules that do not wait until the pipeline is empty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["Versions"]


class Versions:
    """The weights after the last few steps; the newest are the parameters themselves."""

    def __init__(self, parameters: Sequence[nn.Parameter], keep: int) -> None:
        """Begins with what is there.

        Args:
            parameters: of the stage.
            keep: how many versions there are at a time, the newest included.
        """
        self._parameters = parameters
        self._keep = keep
        self._newest = 0
        self._old: dict[int, list[torch.Tensor]] = {}
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
        """Puts a version into the parameters; if there is none so old, the oldest."""
        wanted = max(version, min([*self._old, self._newest]))
        if wanted == self._shown:
            return
        self._old.setdefault(self._shown, [parameter.data for parameter in self._parameters])
        for parameter, data in zip(self._parameters, self._old[wanted], strict=True):
            parameter.data = data
        self._shown = wanted

    def advance(self) -> None:
        """Makes room for the next version: parameters get new memory, for graphs know the memory of the newest."""
        self.show(self._newest)
        self._old[self._newest] = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()
        self._newest += 1
        self._shown = self._newest
        self._old.pop(self._newest, None)
        for version in [version for version in self._old if version <= self._newest - self._keep]:
            del self._old[version]
