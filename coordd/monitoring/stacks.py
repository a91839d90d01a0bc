"""Stacks and process state of this rank: reported to ranks that wait for it, looked up if it does not answer."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from coordd.negotiation.tensor_table import Site, show_site
from coordd.ops.messages import Account

__all__ = [
    "THREAD",
    "Account",
    "Place",
    "account",
    "await_end",
    "current_frames",
    "is_stopped",
    "places",
    "process_state",
]

THREAD = "coordd"
"""Prefix of the names of coordd's own threads."""

_DEPTH = 8
_looking = threading.Lock()
_OURS = ("coordd", "threading")
_DECORATORS = frozenset({"coordd.parallel.collective_calls", "coordd.daemon.reject_on_all_ranks"})


class Place(NamedTuple):
    """A thread's stack: its lines, innermost call last; ``inside`` is the coordd call that it is in, if any."""

    thread: str
    lines: list[str]
    inside: str


def current_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, by the thread's identifier.

    ``sys._current_frames`` holds a lock of the interpreter while it allocates. If the garbage collector ran then, and
    a finalizer released the GIL, a thread that has the GIL and needs that lock, such as for starting a thread, would
    wait for ever (CPython issue 106883).
    """
    with _looking:  # else of two threads the first to leave would enable the collector for the other
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # noqa: SLF001 - the documented way
        finally:
            if enabled:
                gc.enable()


def account(rank: int, last: tuple[str, Site, float] | None, idle: float) -> Account:
    """Describes the main thread's stack, without coordd's own innermost frames, and the last submission."""
    frame = current_frames().get(threading.main_thread().ident or 0)
    told = "nothing yet" if last is None else f"{last[0]!r} at {show_site(last[1])}"
    return Account(rank, _stack(frame), told, idle=idle)


def places(depth: int) -> list[Place]:
    """Returns the stacks of all threads except coordd's own, the main thread first; at most ``depth`` calls each."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sorted(current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, f"thread {ident}")  # a thread started by native code has no name
        if not name.startswith(THREAD):
            outside = _outside(frame)
            found.append(Place(name, _lines(outside, depth), _inside(frame, outside)))
    return found


def _stack(frame: FrameType | None) -> str:
    return "(the main thread has ended)" if frame is None else "\n".join(_lines(_outside(frame), _DEPTH))


def _outside(frame: FrameType) -> FrameType:
    """Returns the innermost frame outside coordd."""
    outside: FrameType | None = frame
    while outside is not None and outside.f_globals.get("__name__", "").startswith(_OURS):
        outside = outside.f_back
    return outside or frame


def _inside(frame: FrameType, outside: FrameType) -> str:
    """Returns the name of the outermost coordd call below frame ``outside``; skips lambdas and decorators."""
    found = ""
    inner: FrameType | None = frame
    while inner is not None and inner is not outside:
        module, name = inner.f_globals.get("__name__", ""), inner.f_code.co_name
        telling = module.startswith(THREAD) and module not in _DECORATORS and name[0] != "<"
        found = f"{module}.{name}" if telling else found
        inner = inner.f_back
    return found


def _lines(frame: FrameType, depth: int) -> list[str]:
    found = traceback.extract_stack(frame, limit=depth)
    return [f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line}" for entry in found]


def process_state(pid: int, host: str, here: str) -> str:
    """Returns the operating system's state of a process of this host, such as ``stopped``; "" for another host's."""
    if host != here:
        return ""
    try:
        import psutil  # importing it takes a fifth of the start-up time, and most jobs do not need it
    except (ImportError, OSError):  # this process may have no file descriptor left
        return ""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
    except (psutil.Error, OSError):  # as above
        return ""


def is_stopped(pid: int) -> bool:
    """Returns whether a process of this host is stopped, by a signal or a debugger; False if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in {b"T", b"t"}
    except (OSError, IndexError):
        return False


def await_end(pid: int, seconds: float) -> None:
    """Waits up to ``seconds`` until a process of this host has ended and its parent has collected its exit status."""
    import psutil  # as above

    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process(pid).wait(seconds)
