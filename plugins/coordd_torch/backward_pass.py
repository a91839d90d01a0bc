"""Notification of the end of a backward pass, also if it fails: autograd's callbacks run only on success."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable

import torch

__all__ = ["BackwardPass"]

_ORDER = operator.attrgetter("order")
_running: dict[int, list[weakref.ref[BackwardPass]]] = {}
"""The objects that wait for the end of each run, by autograd's task id.

Only autograd holds strong references to these objects, and drops them if the run fails."""


class BackwardPass:
    """One run of autograd's engine, which calls this object on success and drops it without a call on failure.

    Several objects may wait for the end of one run, of two optimizers, say. They are notified in an order that is
    equal on all ranks and independent of which of them got a gradient first, because each may wait for the other
    ranks.
    """

    __slots__ = ("__weakref__", "_broken", "_called", "_ended", "_failed", "_task", "order")

    def __init__(
        self,
        ended: Callable[[], None],
        failed: Callable[[], None],
        broken: Callable[[BaseException], None],
        *,
        order: str,
    ) -> None:
        """Registers for the end of the running pass; must be called in one of its hooks.

        Args:
            ended: called on the thread of the pass when it succeeds; ``backward()`` raises its error.
            failed: called when the pass fails, before its error reaches the script; must not raise.
            broken: called with an exception that comes during ``ended`` or right after it, such as that of a signal
                handler.
            order: sort key for the calls of one pass; equal on all ranks.
        """
        self._ended, self._failed, self._broken, self._called = ended, failed, broken, False
        self.order = order
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001 - as below
        _running.setdefault(self._task, []).append(weakref.ref(self))
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way; FSDP uses it, too
        engine.queue_callback(self)

    def __call__(self) -> None:
        """Runs when the pass succeeds: the first object that autograd calls notifies all of them.

        If one of them raises, the pass has failed for the others, which are notified before the error reaches the
        script.
        """
        found = [each() for each in _running.pop(self._task, ())]
        waiting = sorted((each for each in found if each is not None), key=_ORDER)
        try:
            for each in waiting:
                each.end()
        except BaseException as error:
            for each in reversed(waiting):
                if each.interrupt(error):
                    break
            for each in waiting:
                each.fail()
            raise

    def end(self) -> None:
        """Notifies the owner that the pass succeeded."""
        self._called = True
        self._ended()

    def interrupt(self, error: BaseException) -> bool:
        """Notifies the owner of an exception, if it was notified of the end before; returns whether it was."""
        if self._called:
            self._broken(error)
        return self._called

    def fail(self) -> None:
        """Notifies the owner that the pass failed, unless it was already notified."""
        if not self._called:
            self._called = True
            self._failed()

    def __del__(self) -> None:
        _running.pop(self._task, None)
        self.fail()
