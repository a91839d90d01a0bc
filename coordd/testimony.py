"""What a rank says that ends because another one has failed: a few words, for the traceback that counts is the other's.

Its one rule: nothing is left out that is nowhere else.
"""

from __future__ import annotations

import logging
import traceback

from coordd.errors import PeerError, RemoteTraceback
from coordd.handles import is_users

__all__ = ["in_brief"]

log = logging.getLogger("coordd")


def in_brief(error: BaseException) -> str:
    """Says who has failed, why, and where this rank was; nothing of errors that need their traceback.

    They do if they came of something else, too, and where everything is logged.
    """
    if not isinstance(error, PeerError) or _has_a_story(error) or log.isEnabledFor(logging.DEBUG):
        return ""
    said = "".join(traceback.format_exception_only(error))
    return f"{said}  {_whereabouts(error)}COORDD_LOG_LEVEL=debug shows the whole traceback\n"


def _has_a_story(error: PeerError) -> bool:
    """Says whether Python would show another exception with it, but for the one that the other rank shows itself."""
    if error.__cause__ is not None:
        return not isinstance(error.__cause__, RemoteTraceback)
    return error.__context__ is not None and not error.__suppress_context__


def _whereabouts(error: PeerError) -> str:
    """Names the line that the error came through; where a frame has been since then, in a ``finally``, is another."""
    walked = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code.co_filename, line) for frame, line in walked if is_users(frame)]
    return "this rank was at {}:{}; ".format(*places[-1]) if places else ""
