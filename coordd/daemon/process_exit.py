"""Detects process failures for the other ranks: uncaught exceptions, non-zero ``sys.exit`` and SIGTERM.

Python's exit handlers see none of these. So the exception hook, ``sys.exit`` and ``exit`` are wrapped, and SIGTERM is
handled unless other code handles it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from coordd.daemon.sessions import has_ended_main, in_session, is_called_by, session_follows
from coordd.errors import brief

__all__ = ["ExitWatch", "await_own_end"]

# Most characters of an error that are sent to other ranks: its text may be a printed tensor, say.
_LONGEST_LINE = 2_000
_LONGEST_TEXT = 64_000
_QUITTERS = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))
_HEARD_SECONDS = 0.3  # most time that a report, or a signal sent to all ranks, takes to reach the others
_TERMINATED = "was ended by SIGTERM"
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"


class _Exit(SystemExit):
    """A `SystemExit` that can be observed when it is dropped."""


class _Forks:
    """Blocks SIGTERM during a fork until the child no longer handles it; otherwise Python would lose the signal."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._masks = threading.local()  # any thread may fork

    def prepare(self) -> None:
        """Runs before a fork."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def go_on(self) -> None:
        """Runs after a fork in the parent."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def begin(self) -> None:
        """Runs after a fork in the child."""
        self._forget()
        self.go_on()


class ExitWatch:
    """Observes how the main thread ends, and reports failures."""

    def __init__(
        self,
        report: Callable[[str, str, BaseException | None], object],
        in_brief: Callable[[BaseException], str] = lambda _: "",
    ) -> None:
        """Wraps the hooks.

        Args:
            report: called with a reason in one line, a traceback or "", and the exception or None; returns whether
                other ranks receive it. A signal handler may call it, so it must not take a lock.
            in_brief: explains an uncaught exception, or returns "" for a traceback; not used under another hook.
        """
        self._report = report
        self._in_brief = in_brief
        self._excepthook = sys.excepthook
        self._final: tuple[str, str] | None = None
        self._told = self._story = ""
        self._heeded = False
        self._asked = False
        self._status = 0
        self._parting = False
        self._known_to_forks = False
        sys.excepthook = self._uncaught
        for module, name in _QUITTERS:
            if hasattr(module, name):  # Python without site has no exit and quit
                setattr(module, name, self._leaving)
        atexit.register(self._end)
        # Python calls this before it waits for threads, and before exit handlers, which may take long (an upload).
        with contextlib.suppress(AttributeError, RuntimeError):  # another Python, or one that exits already
            threading._register_atexit(self.verdict)  # type: ignore[attr-defined]  # noqa: SLF001 - it has no public name

    @property
    def told(self) -> str:
        """The failure that was reported, in one line; empty if there was none."""
        return self._told

    @property
    def story(self) -> str:
        """The whole report: its line, and the traceback with the causes."""
        return self._story

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has arrived since `heed_sigterm`."""
        return self._asked

    def verdict(self) -> None:
        """Reports a failing ``sys.exit``, or an error that another hook has kept; called as the interpreter exits.

        Sessions and debuggers also keep errors there that have ended nothing.
        """
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self._final is not None:
            final, self._final = self._final, None
            self._tell(*final, None)
        elif not self._told and error is not None and has_ended_main(error):
            self._tell_of(error)

    def insist(self, status: int) -> None:
        """Makes the process end with this exit code, although Python sees no failure, after all other exit handlers."""
        self._status = status

    def hear_sigterm(self) -> None:
        """Makes SIGTERM end this process after a moment in which the other ranks are notified; keeps another handler.

        While the main thread is in native code, the handler runs when that returns. Forked children end at once, as
        always.
        """
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
            if not self._known_to_forks:
                self._known_to_forks = True
                forks = _Forks(self.forget_sigterm)
                os.register_at_fork(before=forks.prepare, after_in_parent=forks.go_on, after_in_child=forks.begin)

    def heed_sigterm(self) -> bool:
        """Makes SIGTERM only set `asked` from now on; returns whether it can: not if other code handles SIGTERM."""
        self._heeded = signal.getsignal(signal.SIGTERM) == self._terminated
        return self._heeded

    def forget_sigterm(self) -> None:
        """Restores the default action of SIGTERM: it ends this process at once."""
        self._heeded = False
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminated(self, number: int, _: FrameType | None) -> None:
        if self._heeded:
            self._asked = True
            return
        if self._parting:  # Slurm signals each process of a rank, and the parent forwards its signal, too
            return
        self._parting = True
        if self._report(_TERMINATED, "", None):
            threading.Event().wait(_HEARD_SECONDS)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # the first process of a container does not end by a signal

    def _end(self) -> None:
        if self._status:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(self._status)

    def _tell(self, reason: str, trace: str, error: BaseException | None) -> None:
        self._told, self._story = reason, f"{reason}\n{trace}"
        self._report(reason, trace, error)

    def _tell_of(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self._tell(f"failed: {brief(error)[:_LONGEST_LINE]}", text[-_LONGEST_TEXT:], error)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_called_by(sys.excepthook) and not in_session(error):
            self._tell_of(error.with_traceback(trace))
        text = self._in_brief(error) if self._excepthook is sys.__excepthook__ else ""
        if text and sys.stderr is not None:
            sys.stderr.write(text)
        else:
            self._excepthook(kind, error, trace)

    def _leaving(self, status: Any = None, /) -> NoReturn:
        if status in (None, 0) or not _in_main_thread():  # only this very class ends a thread silently
            raise SystemExit(status)
        error = _Exit(status)
        if not session_follows():
            code = status if isinstance(status, int) else 1
            frame = sys._getframe(1)  # noqa: SLF001 - the documented way to the caller
            site = "".join(traceback.format_stack(frame)[-4:])
            reason = f"called sys.exit({status!r}) at {_place(frame)}, exit code {code}"
            watch = weakref.finalize(error, self._dropped, reason, site)
            watch.atexit = False  # an exit that was caught and kept is dropped after all handlers have run
        try:
            raise error
        finally:
            del error  # otherwise this frame, which the traceback holds, would keep it

    def _dropped(self, reason: str, site: str) -> None:
        """Records an exit that ends the interpreter, not one that was caught: no Python frame is left to run."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented way to the callers
        while frame is not None and frame.f_globals.get("__name__") in {__name__, "weakref"}:
            frame = frame.f_back
        if frame is None and _in_main_thread():
            self._final = (reason, site)
            if _threads_go_on():  # exit handlers run when these have ended, and they may wait for other ranks
                self.verdict()


def await_own_end(reason: str) -> None:
    """Waits a moment: if a signal ended another rank, it may end this one, too, before this one reports an error."""
    if reason == _TERMINATED:
        threading.Event().wait(_HEARD_SECONDS)


def _place(frame: FrameType) -> str:
    """Returns the innermost line outside Python's own library: `argparse`, say, may have exited for the script."""
    outer: FrameType | None = frame
    while outer is not None and _is_library(outer.f_code.co_filename):
        outer = outer.f_back
    found = outer or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"


def _is_library(file: str) -> bool:
    return file.startswith(("<frozen ", _LIBRARY)) and "-packages" not in file.removeprefix(_LIBRARY)


def _threads_go_on() -> bool:
    """Returns whether Python waits for other threads when the main thread has ended."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
