"""Shortens the output of a rank that ends because another one has failed: the traceback that counts is the other's.

Its one rule: nothing is left out that is nowhere else.
"""

from __future__ import annotations

import logging
import re
import traceback

from coordd.errors import PeerError, RemoteTraceback
from coordd.ops.handles import is_users

__all__ = ["in_brief"]

log = logging.getLogger("coordd")

_IN_A_GRAPH = re.compile(r"\bPeerError: rank \d+ .*")
"""The part of TensorFlow's error text that quotes a `PeerError`, when an operation in a graph has failed."""


def in_brief(error: BaseException) -> str:
    """Returns which rank failed, why, and where this rank was; empty for an error that needs its traceback.

    An error needs its traceback if it has another cause, too, or at log level DEBUG.
    """
    said = _heard(error)
    if not said or _has_a_story(error) or log.isEnabledFor(logging.DEBUG):
        return ""
    return f"{said}  {_whereabouts(error)}COORDD_LOG_LEVEL=debug shows the whole traceback\n"


def _heard(error: BaseException) -> str:
    """Returns the text of a failure of another rank, as its traceback would print it; empty for any other error."""
    if isinstance(error, PeerError):
        return "".join(traceback.format_exception_only(error))
    found = _IN_A_GRAPH.search(str(error)) if type(error).__module__.startswith("tensorflow.") else None
    return f"coordd.errors.{found[0]}\n" if found else ""


def _has_a_story(error: BaseException) -> bool:
    """Returns whether Python would print another exception with it, apart from the other rank's own traceback."""
    if error.__cause__ is not None:
        return not isinstance(error.__cause__, RemoteTraceback)
    return error.__context__ is not None and not error.__suppress_context__


def _whereabouts(error: BaseException) -> str:
    """Names the line that the error came through; a ``finally`` may have moved the frame to another line since."""
    walked = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code.co_filename, line) for frame, line in walked if is_users(frame)]
    return "this rank was at {}:{}; ".format(*places[-1]) if places else ""
