"""What the stages of all frameworks do alike: they keep frames until they are asked for, and show older weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from coordd.pipeline.versions import Versions

__all__ = ["BaseStage"]


class BaseStage:
    """A part of `coordd.pipeline.engine.Stage`, to be inherited.

    Attributes:
        frames: that a pass has packed, by microbatch and by the stage that gets them.
        versions: of the weights, where there are several.
    """

    def __init__(self, *, reduce: Callable[[], None], versions: Versions | None) -> None:
        """Prepares it.

        Args:
            reduce: starts to add the stage's gradients up over the ranks that share them.
            versions: of the weights.
        """
        self.frames: dict[tuple[int, int], np.ndarray] = {}
        self.versions = versions
        self._reduce = reduce

    def restart(self) -> None:
        """Prepares a run."""
        self.frames.clear()
        if self.versions is not None:
            self.versions.restart()

    def output(self, microbatch: int, taker: int) -> np.ndarray:
        """The frame that a later stage gets."""
        return self.frames.pop((microbatch, taker))

    def gradient(self, microbatch: int, giver: int) -> np.ndarray:
        """The frame of gradients that an earlier stage gets."""
        return self.frames.pop((microbatch, giver))

    def recall(self, version: int) -> None:
        """Computes with an older version of the weights, or with the newest again."""
        if self.versions is not None:
            self.versions.show(version)

    def reduce(self) -> None:
        """Starts to add gradients up over the ranks that share variables."""
        self._reduce()

    def advance(self) -> None:
        """Keeps the weights as they are, if any pass will want them, before they change."""
        if self.versions is not None:
            self.versions.advance()
