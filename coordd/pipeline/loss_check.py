"""Decides when a pipeline checks that its loss can be computed microbatch by microbatch, for any framework.

A loss is checked in runs 1, 2, 4, 8 ..., so the cost vanishes in the long run, and in every run until a check is
conclusive. If a check cannot decide, the loss is not checked any more, and the user is warned once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from coordd.pipeline.batch import Batch

__all__ = ["LossCheck", "UnclearError"]


class UnclearError(Exception):
    """A check cannot decide about a loss; the text says why, with the loss as its subject."""


class LossCheck:
    """Decides in which runs a loss is checked, and stores the findings.

    Subclasses in frameworks add the check itself.
    """

    _hint = "PipelineConfig(loss_reduction='mean') says that it is, without this warning"
    """What a user can do about the warning."""

    def __init__(self, *, weighted: bool, wanted: bool = True, declared: bool = False) -> None:
        """Prepares the checks.

        Args:
            weighted: whether `weight=` gives the weights of microbatches.
            wanted: whether the loss is to be checked at all.
            declared: whether the user declared the loss's reduction; if not, a warning says that it cannot be checked.
        """
        self._weighted = weighted
        self._wanted = wanted
        self._declared = declared
        self._runs = 0
        self._conclusive = self._active = False
        self._first: Any = None
        """Data of a microbatch of this run, for comparison with the next one's."""
        self._reason = ""

    def begin(self, batch: Batch) -> None:
        """Decides whether a run is checked; a single microbatch is the whole batch and needs no check."""
        self._first = None
        self._active = False
        if self._wanted and batch.count > 1:
            self._runs += 1
            self._active = not self._conclusive or self._runs.bit_count() == 1

    def end(self) -> None:
        """Releases the data of the run; warns if needed."""
        self._first = None
        self.warn()

    def warn(self) -> None:
        """Warns, once, if the loss cannot be checked."""
        reason, self._reason = self._reason, ""
        if reason and not self._declared:
            kind = "weighted mean that weight= says" if self._weighted else "mean over the rows of a microbatch"
            text = f"coordd takes the loss for the {kind}, and cannot check that: {reason}. {self._hint}"
            warnings.warn(text, stacklevel=3)

    def _attempt(self, check: Callable[[], bool]) -> None:
        """Runs a check, which returns whether it was conclusive, and raises an error if the loss is wrong."""
        try:
            self._conclusive |= check()
        except UnclearError as error:
            self._wanted = self._active = False
            self._reason = str(error)
