"""Hears how a backward pass ends: autograd itself tells only of those that end well."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

__all__ = ["BackwardPass"]

_running: dict[int, weakref.WeakSet[BackwardPass]] = {}
"""By the number of autograd's run, what waits for its end; autograd alone keeps it, and drops it if the run fails."""


class BackwardPass:
    """One run of autograd's engine, which calls this object when it ends well, and drops it without a call if not.

    Several may wait for the end of one run, those of two optimizers, say. They hear of it in an order that is equal on
    all ranks, whichever got its first gradient first, for each may wait for the other ranks.
    """

    __slots__ = ("__weakref__", "_called", "_ended", "_failed", "_task", "order")

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None], *, order: str) -> None:
        """Waits for the end of the pass that runs; call this in one of its hooks.

        Args:
            ended: called on the thread of the pass when it has ended well; its error is that of ``backward()``.
            failed: called when the pass has failed, before its error reaches the script; must not raise.
            order: in which those of one pass are called; equal on all ranks.
        """
        self._ended, self._failed, self._called = ended, failed, False
        self.order = order
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001 - as below
        _running.setdefault(self._task, weakref.WeakSet()).add(self)
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way; FSDP uses it, too
        engine.queue_callback(self)

    def __call__(self) -> None:
        """Runs when the pass has ended well: the first one that autograd calls calls all.

        If one of them raises, the pass has failed for the others: they hear of it before the error reaches the script.
        """
        waiting = sorted(_running.pop(self._task, ()), key=lambda each: each.order)
        try:
            for each in waiting:
                each.end()
        except BaseException:
            for each in waiting:
                each.fail()
            raise

    def end(self) -> None:
        """Tells the owner that the pass has ended well."""
        self._called = True
        self._ended()

    def fail(self) -> None:
        """Tells the owner that the pass has failed, unless it has heard of its end."""
        if not self._called:
            self._called = True
            self._failed()

    def __del__(self) -> None:
        _running.pop(self._task, None)
        self.fail()
