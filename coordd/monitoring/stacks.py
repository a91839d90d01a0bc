"""Stacks and process state of this rank: reported to ranks that wait for it, looked up if it does not answer."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import sys
import threading
from collections.abc import Iterator
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
    "frames_of_other_threads",
    "is_stopped",
    "places",
    "process_state",
]

THREAD = "coordd"
"""Prefix of the names of coordd's own threads."""

_DEPTH = 8
_looking = threading.RLock()  # a handler of a signal may look or fork while its thread does
_OURS = ("coordd", "threading")
_DECORATORS = frozenset({"coordd.parallel.collective_calls", "coordd.daemon.reject_on_all_ranks"})


class Place(NamedTuple):
    """A thread's stack: its lines, innermost call last; ``inside`` is the coordd call that it is in, if any."""

    thread: str
    lines: list[str]
    inside: str


class _Call(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str


# A child has neither a lock that another thread holds nor a disabled collector.
os.register_at_fork(before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release)


@contextlib.contextmanager
def frames_of_other_threads() -> Iterator[dict[int, FrameType]]:
    """Gives the innermost frames of all threads but the calling one, by the threads' identifiers, for a short time.

    A frame keeps the local variables of a function alive after its return, so that a file would not be closed, for
    example. So the ``with`` block must not wait for anything, and must not pass frames on. The caller's own frame is
    left out: its local variables refer to the dictionary, which would refer to the frame, and all would stay until
    the garbage collector finds them.

    ``sys._current_frames`` holds a lock of the interpreter while it allocates. If the garbage collector ran then, and
    a finalizer released the GIL, a thread that has the GIL and needs that lock, such as for starting a thread, would
    wait for ever (CPython issue 106883).
    """
    with _looking:  # else of two threads the first to leave would enable the collector for the other
        enabled = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()  # noqa: SLF001 - the documented way
        finally:
            if enabled:
                gc.enable()
    frames.pop(threading.get_ident(), None)
    try:
        yield frames
    finally:
        frames.clear()


def account(rank: int, last: tuple[str, Site, float] | None, idle: float) -> Account:
    """Describes the main thread's stack, without coordd's own innermost frames, and the last submission."""
    main = threading.main_thread().ident or 0
    if main == threading.get_ident():
        calls = _calls(_outside(sys._getframe()), _DEPTH)  # noqa: SLF001 - the documented way
    else:
        with frames_of_other_threads() as frames:
            calls = _calls(_outside(frames[main]), _DEPTH) if main in frames else []
    told = "nothing yet" if last is None else f"{last[0]!r} at {show_site(last[1])}"
    return Account(rank, "\n".join(_lines(calls)) or "(the main thread has ended)", told, idle=idle)


def places(depth: int) -> list[Place]:
    """Returns the stacks of other threads, except coordd's own, the main thread first; at most ``depth`` calls each."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with frames_of_other_threads() as frames:
        found = {ident: _place(frame, depth) for ident, frame in frames.items()}
    main = threading.main_thread().ident
    stacks = []
    for ident, (calls, inside) in sorted(found.items(), key=lambda item: item[0] != main):
        name = names.get(ident, f"thread {ident}")  # a thread started by native code has no name
        if not name.startswith(THREAD):
            stacks.append(Place(name, _lines(calls), inside))
    return stacks


def _place(frame: FrameType, depth: int) -> tuple[list[_Call], str]:
    """Returns a thread's calls outside coordd, and the coordd call that it is in."""
    outside = _outside(frame)
    return _calls(outside, depth), _inside(frame, outside)


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


def _calls(frame: FrameType, depth: int) -> list[_Call]:
    """Returns the innermost calls of a stack, innermost last, without reading source files."""
    found: list[_Call] = []
    inner: FrameType | None = frame
    while inner is not None and len(found) < depth:
        line = inner.f_lineno or inner.f_code.co_firstlineno  # an instruction at the start of a function has no line
        found.append(_Call(inner.f_code.co_filename, line, inner.f_code.co_name))
        inner = inner.f_back
    return found[::-1]


def _lines(calls: list[_Call]) -> list[str]:
    for file in {call.file for call in calls}:
        linecache.checkcache(file)
    return [f"{file}:{line} in {name}: {linecache.getline(file, line).strip()}" for file, line, name in calls]


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
