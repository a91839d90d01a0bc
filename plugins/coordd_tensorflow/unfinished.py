"""Detects graph steps that fail after some of their gradients were submitted.

The call that runs the graph raises, and the operation that waits for the gradients never runs. So a thread checks, a
few times a second, whether the script has left that call although its step has begun and not ended. Then all ranks
discard the step at once, and not only when this rank begins its next one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Hashable
from types import FrameType
from typing import NamedTuple

from coordd.gradients.reducer import Gradients
from coordd.monitoring.stacks import frames_of_other_threads

__all__ = ["UNFINISHED", "Unfinished", "functions_called"]

_LOOK_SECONDS = 0.25
_EXECUTE = frozenset({"quick_execute", "execute_with_cancellation"})
_FILE = "tensorflow/python/eager/execute.py"


class _Step(NamedTuple):
    """A step that has begun, and the calls that may run it.

    Attributes:
        step: its id.
        calls: the script's calls, by thread: their frames, which this object keeps alive.
    """

    step: Hashable
    calls: dict[int, FrameType]


class Unfinished:
    """The steps of this process that have begun, by their gradients."""

    def __init__(self) -> None:
        self._steps: dict[Gradients, _Step] = {}
        self._guard = threading.Lock()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, gradients: Gradients, step: Hashable) -> None:
        """Watches a step, if any thread is inside a TensorFlow call that runs a graph.

        The step runs in one of these calls, and TensorFlow does not say in which; so all must have returned before it
        counts as failed.

        Args:
            gradients: of the step.
            step: its id.
        """
        known = self._steps.get(gradients)
        if (known is not None and known.step == step) or not (calls := _executions()):
            return
        with self._guard:
            self._steps[gradients] = _Step(step, calls)
            self._some.set()
            if self._thread is None or not self._thread.is_alive():  # as in a forked child
                self._thread = threading.Thread(target=self._watch, name="coordd steps", daemon=True)
                self._thread.start()

    def end(self, gradients: Gradients) -> None:
        """Records that a step ended."""
        with self._guard:
            self._steps.pop(gradients, None)

    def _watch(self) -> None:
        while True:
            self._some.wait()
            time.sleep(_LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        """Gives up each step that has not ended although its calls have returned.

        A function of its own, so that no local variable keeps the calls, and with them those of the script, until the
        next step.
        """
        with self._guard:
            steps = dict(self._steps)
            if not steps:
                self._some.clear()
        for gradients, step in steps.items():
            if not any(_contains(thread, frame) for thread, frame in step.calls.items()):
                self._forget(gradients, step)
                gradients.give_up(step.step)

    def _forget(self, gradients: Gradients, step: _Step) -> None:
        with self._guard:
            if self._steps.get(gradients) is step:  # else the next one has begun meanwhile
                del self._steps[gradients]


def _executions() -> dict[int, FrameType]:
    """Returns the calls in which threads run graphs or operations, by thread."""
    own = _execution(sys._getframe())  # noqa: SLF001 - the documented way
    found = {} if own is None else {threading.get_ident(): own}
    with frames_of_other_threads() as frames:
        for thread, frame in frames.items():
            if (call := _execution(frame)) is not None:
                found[thread] = call
    return found


def _execution(frame: FrameType | None) -> FrameType | None:
    """Returns the outermost call in which a thread with this innermost frame runs a graph or an operation."""
    found = None
    while frame is not None:
        if frame.f_code.co_name in _EXECUTE and frame.f_code.co_filename.endswith(_FILE):
            found = frame
        frame = frame.f_back
    return found


def functions_called() -> int:
    """Returns the number of threads inside a call that runs a graph or an operation."""
    return len(_executions())


def _contains(thread: int, wanted: FrameType) -> bool:
    """Returns whether another thread is still in a call."""
    with frames_of_other_threads() as frames:
        frame = frames.get(thread)
        while frame is not None and frame is not wanted:
            frame = frame.f_back
        return frame is not None


UNFINISHED = Unfinished()
