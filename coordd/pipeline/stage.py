"""Common part of the stages of all frameworks: stores frames until they are sent, and selects versions of weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from coordd.pipeline.versions import Versions

__all__ = ["BaseStage"]


class BaseStage:
    """A partial implementation of `coordd.pipeline.engine.Stage`, to be inherited.

    Attributes:
        frames: packed by a pass, by microbatch and by the stage that receives them.
        versions: of the weights, if there are several.
    """

    def __init__(self, *, reduce: Callable[[], None], versions: Versions | None) -> None:
        """Prepares the stage.

        Args:
            reduce: starts the reduction of the stage's gradients over the ranks that share them.
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
        """Returns the frame for a later stage, and forgets it."""
        return self.frames.pop((microbatch, taker))

    def gradient(self, microbatch: int, giver: int) -> np.ndarray:
        """Returns the frame of gradients for an earlier stage, and forgets it."""
        return self.frames.pop((microbatch, giver))

    def recall(self, version: int) -> None:
        """Selects a version of the weights for the next passes."""
        if self.versions is not None:
            self.versions.show(version)

    def reduce(self) -> None:
        """Starts the reduction of gradients over the ranks that share variables."""
        self._reduce()

    def advance(self) -> None:
        """Stores the current weights before they change, if a later pass needs them."""
        if self.versions is not None:
            self.versions.advance()
