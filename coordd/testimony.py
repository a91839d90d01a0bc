"""What a rank says that ends because another one has failed: a few words, for the traceback that counts is the other's.

Its one rule: nothing is left out that is nowhere else.
"""

from __future__ import annotations

import logging
import re
import traceback

from coordd.errors import PeerError, RemoteTraceback
from coordd.handles import is_users

__all__ = ["in_brief"]

log = logging.getLogger("coordd")

_IN_A_GRAPH = re.compile(r"\bPeerError: rank \d+ .*")
"""What TensorFlow's own error has of ours in its text, when an operation in a graph has failed."""


def in_brief(error: BaseException) -> str:
    """Says who has failed, why, and where this rank was; nothing of errors that need their traceback.

    They do if they came of something else, too, and where everything is logged.
    """
    said = _heard(error)
    if not said or _has_a_story(error) or log.isEnabledFor(logging.DEBUG):
        return ""
    return f"{said}  {_whereabouts(error)}COORDD_LOG_LEVEL=debug shows the whole traceback\n"


def _heard(error: BaseException) -> str:
    """What an error says of another rank's failure, as its traceback would; nothing of any other error."""
    if isinstance(error, PeerError):
        return "".join(traceback.format_exception_only(error))
    found = _IN_A_GRAPH.search(str(error)) if type(error).__module__.startswith("tensorflow.") else None
    return f"coordd.errors.{found[0]}\n" if found else ""


def _has_a_story(error: BaseException) -> bool:
    """Says whether Python would show another exception with it, but for the one that the other rank shows itself."""
    if error.__cause__ is not None:
        return not isinstance(error.__cause__, RemoteTraceback)
    return error.__context__ is not None and not error.__suppress_context__


def _whereabouts(error: BaseException) -> str:
    """Names the line that the error came through; where a frame has been since then, in a ``finally``, is another."""
    walked = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code.co_filename, line) for frame, line in walked if is_users(frame)]
    return "this rank was at {}:{}; ".format(*places[-1]) if places else ""
