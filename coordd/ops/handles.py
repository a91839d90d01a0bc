"""Handles: every asynchronous operation, of any ordering class, returns one for its future result."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, TracebackType
from typing import Any, Generic, TypeVar

from coordd.errors import (
    CoorddError,
    DeadlockError,
    PeerError,
    RefusedError,
    ShutdownError,
    is_deadlock,
    note_heard,
)
from coordd.ops.checks import finite

__all__ = [
    "Handle",
    "Observer",
    "awaited",
    "call_site",
    "called_from",
    "check_may_wait",
    "exits",
    "forbid_waiting",
    "hear_of",
    "is_users",
    "raised_by_coordd",
    "raised_by_handler",
    "users_frame",
    "wait_all",
]

log = logging.getLogger("coordd")
Result = TypeVar("Result")
Hurry = Callable[[str], Callable[[], None] | None]


_FOR_EVER = -1.0
"""Time limit of a lock that means no limit."""


class _Callback:
    """A function to call when a handle is done; two of them are never equal, even for one function."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.call = call


class Handle(Generic[Result]):
    """One operation in flight.

    The daemon keeps the operation's tensors alive until it is done. Any thread may wait, any number of times. If it
    fails and is dropped before its result or error is read, the log reports that: once per process.

    It has no lock. A signal handler may interrupt the main thread anywhere and wait for an operation, which the
    daemon's thread could not complete if the main thread held a lock that it needs. Single operations of lists are
    atomic.
    """

    __slots__ = (
        "__weakref__",
        "_broken_off",
        "_callbacks",
        "_done",
        "_error",
        "_gates",
        "_hurry",
        "_result",
        "_unheard",
        "name",
        "submitted",
    )

    def __init__(self, name: str, hurry: Hurry | None = None, broken_off: Callable[[], None] | None = None) -> None:
        """Creates a pending handle.

        Args:
            name: the operation.
            hurry: called with the name when a thread starts to wait, so that the daemon ends its batching window; the
                function that it returns, if any, is called when the wait is over.
            broken_off: called when an exception, such as that of a signal handler, ends a wait.
        """
        self.name = name
        self.submitted = time.monotonic()
        self._hurry = hurry
        self._broken_off = broken_off
        self._done = False
        self._error: BaseException | None = None
        self._result: Result | None = None
        self._gates: list[threading.Lock] = []  # one per waiting thread
        self._callbacks: list[_Callback] = []

    def poll(self) -> bool:
        """Returns whether `result` would return at once."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the operation is done, at most ``timeout`` seconds.

        Returns:
            whether it is done.

        Raises:
            ArgumentError: the time is not a finite number.
            DeadlockError: it is not done, and the calling thread is coordd's own, which has to do it.
        """
        if timeout is not None:
            timeout = max(0.0, finite(timeout, "timeout"))
        if self._done:
            return True
        if timeout is None or timeout > 0.0:
            check_may_wait(f"waiting for {self.name!r}")
        gate = threading.Lock()  # an Event takes ten times as long
        gate.acquire()
        self._gates.append(gate)
        if self._done:  # `_finish` sets the flag before it opens the gates, so one of the two sees the other
            return True
        try:
            self._stand_at(gate, _FOR_EVER if timeout is None else max(0.0, timeout))
        except BaseException:  # a signal handler has ended the wait, so a later failure is not logged as unread
            self.add_done_callback(hear_of)
            if self._broken_off is not None:
                self._broken_off()
            raise
        finally:
            if not self._done:
                self._leave(gate)
        return self._done

    def waits_for(self, promise: object) -> bool:
        """Returns whether it completes only after ``promise``; handles of several operations override this."""
        return promise is self

    def _stand_at(self, gate: threading.Lock, timeout: float) -> None:
        """Ends the daemon's batching window, and waits for the gate."""
        over = self._hurry(self.name) if self._hurry is not None else None
        try:
            gate.acquire(timeout=timeout)
        finally:
            if over is not None:
                over()

    def _leave(self, gate: threading.Lock) -> None:
        """Removes a gate that no thread waits at any more."""
        with contextlib.suppress(ValueError):  # the operation may be done by now, and its gates taken
            self._gates.remove(gate)

    def result(self, timeout: float | None = None) -> Result:
        """Waits, and returns the operation's result.

        Raises:
            TimeoutError: it was not done within ``timeout`` seconds.
            DeadlockError: see `wait`.
            CoorddError: the operation failed; every rank that takes part gets the error.
        """
        if not self.wait(timeout):
            text = f"{self.name!r} is still in flight after {timeout} s"
            raise TimeoutError(text)
        if self._error is not None:
            self._hear()
            raise self._error.with_traceback(None)  # otherwise it would grow with every call
        return self._result  # type: ignore[return-value]  # a done handle without an error has its result

    def error(self) -> BaseException | None:
        """Returns the operation's error; None if it has not failed."""
        if self._error is not None:
            self._hear()
        return self._error

    def add_done_callback(self, callback: Callable[[Handle[Result]], Any]) -> None:
        """Calls ``callback(handle)`` once it is done: on the daemon's thread, or at once if it is done already.

        It may start operations, but must not wait for them: that raises `DeadlockError`. Its errors are logged.
        """
        if callback is hear_of and any(known.call is hear_of for known in list(self._callbacks)):
            return
        added = _Callback(callback)
        self._callbacks.append(added)
        # The order matters: the later of this check and that of `_finish` sees both the callback and the flag.
        if self._done:
            try:
                self._callbacks.remove(added)
            except ValueError:  # the daemon's thread calls it
                return
            self._call_back([added])

    @property
    def has_callbacks(self) -> bool:
        """Whether the script has callbacks that have not been called yet."""
        return not all(known.call is hear_of or isinstance(known.call, Observer) for known in list(self._callbacks))

    def resolve(self, result: Result) -> None:
        """Completes the operation; for the daemon."""
        self._result = result
        self._finish()

    def land(self, value: Any, convert: Callable[[Any], Result] | None) -> None:
        """Completes the operation with ``convert(value)``; an error of ``convert`` fails this operation alone."""
        try:
            result = value if convert is None else convert(value)
        except BaseException as error:  # noqa: BLE001 - for the waiting thread; ``sys.exit()`` must not end the daemon
            self.fail(error)
        else:
            self.resolve(result)

    def fail(self, error: BaseException) -> None:
        """Ends the operation with an error; for the daemon."""
        told = isinstance(error, (PeerError, RefusedError)) or (isinstance(error, ShutdownError) and not error.ranks)
        # Only failures pay for this. It keeps the text, because the error's traceback may hold this handle.
        self._unheard = None if told else weakref.finalize(self, _tell, self.name, _text(error))
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._done = True
        gates = self._gates
        while gates:
            try:
                gate = gates.pop()
            except IndexError:  # a thread whose time is up has removed it meanwhile
                break
            gate.release()
        if self._callbacks:
            self._call_back(self._callbacks)

    @property
    def lost(self) -> bool:
        """Whether a deadlock between ranks has failed it; does not count as a notification of the script."""
        if is_deadlock(self._error):
            self._mute()
            return True
        return False

    def _hear(self) -> None:
        """Notes that the script was notified of the failure."""
        self._mute()
        note_heard(self._error)

    def _mute(self) -> None:
        """Keeps the log from reporting the failure as never read."""
        if self._unheard is not None:
            self._unheard.detach()

    def _call_back(self, callbacks: list[_Callback]) -> None:
        """Calls and removes these callbacks; other threads may remove some meanwhile."""
        if self._error is not None:
            self._mute()
        with _unable_to_wait():
            while callbacks:
                try:
                    callback = callbacks.pop(0)
                except IndexError:
                    break
                try:
                    callback.call(self)
                except BaseException:
                    log.exception("a callback of %r failed", self.name)

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self._done else "pending"
        return f"<Handle {self.name!r} {state}>"


class Observer:
    """A done callback of coordd itself, which submits no operation."""

    def __init__(self, call: Callable[[Handle[Any]], None]) -> None:
        """Wraps a function."""
        self._call = call

    def __call__(self, handle: Handle[Any]) -> None:
        """Calls it."""
        self._call(handle)


def hear_of(_: Handle[Any]) -> None:
    """A done callback that does nothing; with it the failure of the operation is not logged as never read."""


def _text(error: BaseException) -> str:
    """Formats an error, whose class may be the user's own and fail in ``__str__``."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - as above
        return type(error).__name__


_told = False  # per process: where one operation fails unread, those of each step often do


def _tell(name: str, reason: str) -> None:
    """Logs a failure that was never read; runs where the handle is dropped, or as the interpreter exits."""
    global _told  # noqa: PLW0603 - an Event has a lock, and this may run while that is held
    if not _told:
        _told = True
        log.warning(
            "%r has failed, and nobody has asked for its result: %s; wait for every handle (further ones are not told)",
            name,
            reason,
        )


def awaited(frame: FrameType | None) -> Handle[Any] | None:
    """Returns the handle that a thread waits for without a time limit, or None, given its innermost frame."""
    if frame is None or frame.f_code is not Handle._stand_at.__code__:  # noqa: SLF001 - in this file
        return None
    handle, timeout = frame.f_locals.get("self"), frame.f_locals.get("timeout")
    return handle if isinstance(handle, Handle) and timeout == _FOR_EVER else None


def wait_all(handles: Iterable[Handle[Any]]) -> None:
    """Waits for all handles, then raises the error of the first that failed.

    Raises:
        CoorddError: an operation failed.
    """
    waited = list(handles)
    for handle in waited:
        handle.wait()
    failed = [handle for handle in waited if handle.error() is not None]
    if failed:
        failed[0].result()


def forbid_waiting() -> None:
    """Makes `check_may_wait` reject this thread, the daemon's, from now on."""
    _here.daemon = True


@contextmanager
def _unable_to_wait() -> Iterator[None]:
    """Makes `check_may_wait` reject this thread inside the block, which runs done callbacks.

    They must not wait on any thread: otherwise timing would decide which ranks do.
    """
    before, _here.daemon = getattr(_here, "daemon", False), True
    try:
        yield
    finally:
        _here.daemon = before


def check_may_wait(what: str) -> None:
    """Accepts every thread except a daemon's own, which would wait for itself, and one that runs a done callback.

    Raises:
        DeadlockError: ``what``, the thread's current action, may block.
    """
    if getattr(_here, "daemon", False):
        raise DeadlockError(what)


_here = threading.local()
_FRAMEWORKS = ("torch", "tensorflow", "keras")
_AUTOGRAPH = "__autograph_generated_file"  # TensorFlow's generated copies of functions, whose files may no longer exist
_INSIDE = tuple(f"{name}." for name in _FRAMEWORKS)


def call_site(frame: Any, package: str = "coordd") -> tuple[CodeType, int] | None:
    """Returns the innermost line outside coordd and the frameworks, cheaply: as a code object and a line number."""
    found = users_frame(frame, package)
    return getattr(_here, "site", None) if found is None else (found.f_code, found.f_lineno)


def users_frame(frame: Any, package: str = "coordd") -> Any:
    """Returns the innermost frame outside coordd and the frameworks, from ``frame`` outward; None if there is none."""
    while frame is not None and _is_inside(frame.f_globals.get("__name__", ""), frame.f_code.co_filename, package):
        frame = frame.f_back
    return frame


def raised_by_handler(trace: TracebackType | None) -> bool:
    """Returns whether the user's code raised an error while coordd or a framework ran, given its traceback.

    A signal handler does so.
    """
    users = [is_users(frame) for frame, _ in traceback.walk_tb(trace)]
    return any(not outer and inner for outer, inner in itertools.pairwise(users))


def exits(error: BaseException) -> bool:
    """Returns whether an error ends the process with exit code 0, as ``sys.exit()`` in a handler of SIGTERM does."""
    return isinstance(error, SystemExit) and not error.code


def raised_by_coordd(error: BaseException) -> bool:
    """Returns whether coordd itself raised an error, not a signal handler, which may call coordd as well."""
    return isinstance(error, CoorddError) and not raised_by_handler(error.__traceback__)


def is_users(frame: Any, package: str = "coordd") -> bool:
    """Returns whether a frame is neither coordd's nor a framework's, nor a ``with`` statement's machinery."""
    return not _is_inside(frame.f_globals.get("__name__", ""), frame.f_code.co_filename, package)


@functools.lru_cache(maxsize=4096)  # called several times for each operation
def _is_inside(module: str, file: str, package: str) -> bool:
    inside = module.startswith((package, *_INSIDE)) or module in _FRAMEWORKS or module == "contextlib"
    return inside or _AUTOGRAPH in file


@contextmanager
def called_from(site: tuple[CodeType, int] | None) -> Iterator[None]:
    """Sets the line that `call_site` reports on this thread if it runs no line of a script.

    Such as the line that created a graph.
    """
    before, _here.site = getattr(_here, "site", None), site
    try:
        yield
    finally:
        _here.site = before
