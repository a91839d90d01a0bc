"""Handling of gradients that contain an infinity or a NaN, if the user sets ``nonfinite``."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from coordd.errors import NonFiniteError

__all__ = ["Finiteness"]

log = logging.getLogger("coordd")


class Finiteness:
    """Checks each local gradient before it is reduced, and the reduced gradients before they are used.

    A non-finite value of one rank makes the sum non-finite, so all ranks find the same and skip the same steps without
    further communication.
    """

    def __init__(self, wanted: str, rank: int) -> None:
        """Stores the settings.

        Args:
            wanted: ``warn``, ``skip`` or ``raise``.
            rank: this rank.
        """
        self._wanted = wanted
        self._rank = rank
        self.skips = False
        """Whether to skip the next step."""

    def look(self, name: str, value: torch.Tensor | None) -> None:
        """Checks a local gradient; logs a warning, or raises, with its name if it is not finite.

        Raises:
            NonFiniteError: the gradient is not finite, and `wanted` is ``raise``.
        """
        if value is not None and value.is_sparse:
            value = value._values()  # noqa: SLF001 - uncoalesced: values of equal indices are not summed yet
        if value is None or bool(torch.isfinite(value).all()):
            return
        nans, infinities = (int(found(value).sum()) for found in (torch.isnan, torch.isinf))
        error = NonFiniteError(name, self._rank, nans=nans, infinities=infinities)
        if self._wanted == "raise":
            raise error
        log.warning("%s", error)

    def judge(self, sums: Iterable[torch.Tensor]) -> None:
        """Decides from the reduced gradients whether the step is skipped; equal on all ranks."""
        if self._wanted == "skip" and not all(bool(torch.isfinite(value).all()) for value in sums):
            self.skips = True
            log.warning("this step is skipped on all ranks: a gradient is not finite")
