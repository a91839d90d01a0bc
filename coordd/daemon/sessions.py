"""Distinguishes an error that ends the interpreter from one after which an interactive session or other code continues.

Python calls the same hook for both, and leaves both in ``sys.last_exc``. The traceback of an error that ends the
interpreter begins in a frame that has ended by it, that of the main module; that of an error that was caught begins
where it was caught.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

__all__ = ["has_ended_main", "in_session", "is_called_by", "session_follows"]

_TYPED = ("<stdin>", "<console>", "<python-input-", "<ipython-input-")
_ANEW = dis.opmap["RERAISE"]


def is_called_by(hook: Any) -> bool:
    """Returns whether the interpreter, and not Python code, has called the running hook, ``sys.excepthook``.

    Python code that calls it, such as a console, catches errors, prints them this way, and continues.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType = sys._getframe(1)  # noqa: SLF001 - the documented way to the callers
    while frame.f_back is not None:
        frame = frame.f_back
    code = _code(hook)
    return code is None or frame.f_code is code


def in_session(error: BaseException) -> bool:
    """Returns whether an uncaught error returns to, or starts, an interactive session."""
    if sys.flags.interactive or session_follows():
        return True
    first = error.__traceback__
    return hasattr(sys, "ps1") and first is not None and first.tb_frame.f_code.co_filename.startswith(_TYPED)


def session_follows() -> bool:
    """Returns whether a session follows however the script ends, as with ``python -i``."""
    if hasattr(sys, "ps1"):  # the session has begun
        return False
    inspects = sys.flags.inspect or os.environ.get("PYTHONINSPECT")
    return bool(sys.flags.interactive or (inspects and sys.stdin is not None and sys.stdin.isatty()))


def has_ended_main(error: BaseException) -> bool:
    """Returns whether an error has ended the main module, so that the interpreter exits because of it."""
    first = error.__traceback__
    if first is None or in_session(error):
        return False
    frame = first.tb_frame
    if frame.f_globals.get("__name__") not in {"__main__", "runpy"} or frame.f_code.co_filename.startswith(_TYPED[1:]):
        return False
    last = frame.f_code.co_code[frame.f_lasti] if frame.f_lasti >= 0 else 0
    return frame.f_lasti == first.tb_lasti or last == _ANEW


def _code(hook: Any) -> CodeType | None:
    """Returns the code that runs first when a hook is called; None for a hook that is not written in Python."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    found: Callable[..., Any] = getattr(hook, "__func__", hook)
    if not hasattr(found, "__code__"):
        found = getattr(type(hook).__call__, "__func__", type(hook).__call__)
    code = getattr(found, "__code__", None)
    return code if isinstance(code, CodeType) else None
