"""Hears how a backward pass ends: autograd itself tells only of those that end well."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["BackwardPass"]


class BackwardPass:
    """One run of autograd's engine, which calls this object when it ends well, and drops it without a call if not."""

    __slots__ = ("_called", "_ended", "_failed")

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        """Waits for the end of the pass that runs; call this in one of its hooks.

        Args:
            ended: called on the thread of the pass when it has ended well; its error is that of ``backward()``.
            failed: called when the pass has failed, before its error reaches the script; must not raise.
        """
        self._ended, self._failed, self._called = ended, failed, False
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way; FSDP uses it, too
        engine.queue_callback(self)

    def __call__(self) -> None:
        """Runs when the pass has ended well."""
        self._called = True
        self._ended()

    def __del__(self) -> None:
        if not self._called:
            self._failed()
