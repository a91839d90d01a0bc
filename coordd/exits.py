"""Why this process ends: an uncaught exception and a non-zero ``sys.exit`` are failures that others must hear of.

Python tells its exit handlers neither. So the exception hook and ``sys.exit`` are wrapped while a daemon runs.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

__all__ = ["ExitWatch"]

# What others are told of an error whose text is, say, a printed tensor.
_LONGEST_LINE = 2_000
_LONGEST_TEXT = 64_000


class _Exit(SystemExit):
    """A `SystemExit` that can be observed when it is dropped."""


class ExitWatch:
    """Learns how the main thread ends, and reports what is a failure."""

    def __init__(self, report: Callable[[str, str, BaseException | None], None]) -> None:
        """Wraps the hooks.

        Args:
            report: called with a reason in one line, a traceback or "", and the exception or None.
        """
        self._report = report
        self._excepthook = sys.excepthook
        self._exit = sys.exit
        self._final: tuple[str, str] | None = None
        sys.excepthook = self._uncaught
        sys.exit = self._leaving

    def verdict(self) -> None:
        """Reports a failing ``sys.exit``; called while the interpreter exits."""
        if self._final is not None:
            self._report(*self._final, None)

    def restore(self) -> None:
        """Takes the wraps off, unless somebody has put others on top."""
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._excepthook
        if sys.exit == self._leaving:
            sys.exit = self._exit

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        last = traceback.format_exception_only(kind, error)[-1].strip()
        text = "".join(traceback.format_exception(kind, error, trace))
        self._report(f"failed: {last[:_LONGEST_LINE]}", text[-_LONGEST_TEXT:], error)
        self._excepthook(kind, error, trace)

    def _leaving(self, status: Any = None, /) -> NoReturn:
        error = _Exit(status)
        if status not in (None, 0):
            code = status if isinstance(status, int) else 1
            frame = sys._getframe(1)  # noqa: SLF001 - the documented way to the caller
            site = "".join(traceback.format_stack(frame)[-4:])
            watch = weakref.finalize(error, self._dropped, f"called sys.exit({status!r}), exit code {code}", site)
            watch.atexit = False  # an exit that somebody has caught and kept is dropped after all handlers have run
        try:
            raise error
        finally:
            del error  # else this very frame, which the traceback holds, would keep it

    def _dropped(self, reason: str, site: str) -> None:
        """Tells an exit that ends the interpreter from one that somebody caught: no Python code is left to run."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        while frame is not None and frame.f_globals.get("__name__") in {__name__, "weakref"}:
            frame = frame.f_back
        if frame is None:
            self._final = (reason, site)
