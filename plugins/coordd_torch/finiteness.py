"""What happens to gradients that hold an infinity or a NaN, where the user wants something to (``nonfinite``)."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from coordd.errors import NonFiniteError

__all__ = ["Finiteness"]

log = logging.getLogger("coordd")


class Finiteness:
    """Looks at each gradient of this rank before it travels, and names it; looks at the sums before they are used.

    What one rank has is in the sum of all, so all ranks find the same, and skip the same steps, without a word.
    """

    def __init__(self, wanted: str, rank: int) -> None:
        """Starts to look.

        Args:
            wanted: ``warn``, ``skip`` or ``raise``.
            rank: this one.
        """
        self._wanted = wanted
        self._rank = rank
        self.skips = False
        """Whether the step that follows is to be skipped."""

    def look(self, name: str, value: torch.Tensor | None) -> None:
        """Names what is not finite.

        Raises:
            NonFiniteError: it holds such values, and that is to be an error.
        """
        if value is not None and value.is_sparse:
            value = value._values()  # noqa: SLF001 - those of equal indices are not added up yet
        if value is None or bool(torch.isfinite(value).all()):
            return
        nans, infinities = (int(found(value).sum()) for found in (torch.isnan, torch.isinf))
        error = NonFiniteError(name, self._rank, nans=nans, infinities=infinities)
        if self._wanted == "raise":
            raise error
        log.warning("%s", error)

    def judge(self, sums: Iterable[torch.Tensor]) -> None:
        """Decides, alike on all ranks, whether the step is skipped."""
        if self._wanted == "skip" and not all(bool(torch.isfinite(value).all()) for value in sums):
            self.skips = True
            log.warning("this step is skipped on all ranks: a gradient is not finite")
