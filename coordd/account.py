"""What this rank is doing: told to others when they wait for it, and looked up when it does not answer."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from types import FrameType

from coordd.messages import Account
from coordd.table import Site, show_site

__all__ = ["account", "await_end", "process_state"]

_DEPTH = 8
_OURS = ("coordd", "threading")


def account(rank: int, last: tuple[str, Site] | None) -> Account:
    """Describes the main thread's stack, without coordd's own frames at its end, and the last submission."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the documented way
    told = "nothing yet" if last is None else f"{last[0]!r} at {show_site(last[1])}"
    return Account(rank, _stack(frame), told)


def _stack(frame: FrameType | None) -> str:
    if frame is None:
        return "(the main thread has ended)"
    outside: FrameType | None = frame
    while outside is not None and outside.f_globals.get("__name__", "").startswith(_OURS):
        outside = outside.f_back
    lines = [
        f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line}"
        for entry in traceback.extract_stack(outside or frame)
    ]
    return "\n".join(lines[-_DEPTH:])


def process_state(pid: int, host: str, here: str) -> str:
    """Says how the operating system sees a process of this host, such as ``stopped``; empty for another host's."""
    if host != here:
        return ""
    import psutil  # takes a fifth of the time to start, and most jobs end well

    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:
        return ""


def await_end(pid: int, seconds: float) -> None:
    """Waits, at most so long, until a process of this host has ended and its parent knows how."""
    import psutil  # as above

    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).wait(seconds)
