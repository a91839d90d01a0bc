"""Exceptions at each place of coordd in turn, as a signal handler may raise them.

They are raised by a trace function, which sees more places than a signal handler can interrupt.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, MethodType

__all__ = ["Handler", "TimeIsUpError", "handlers"]

ELSEWHERE = ("contextlib", "torch.amp.autocast_mode", "torch.autograd.grad_mode")
TIMES = 4
"""How often the exception is raised at one place, in as many jobs, where the thread comes there often."""


class TimeIsUpError(Exception):
    """What a handler raises by default."""


class Handler:
    """Raises at a place of coordd that a thread reaches, counted from the first call for which ``begins`` is true.

    Places are the functions that it calls, each once, or with ``every`` each call and each line, the first times that
    they come: a comparison of parameters runs some lines hundreds of times.
    With ``as_torch`` the exception looks like one of PyTorch, such as for want of memory. The thread sets ``trace`` as
    its trace function.
    """

    def __init__(
        self,
        number: int,
        *,
        every: bool,
        as_torch: bool = False,
        begins: Callable[[FrameType], bool],
        error: type[BaseException] = TimeIsUpError,
    ) -> None:
        self.where = ""
        self.trace = MethodType(_of_torch(Handler.raise_there) if as_torch else Handler.raise_there, self)
        self._number = number
        self._every = every
        self._begins = begins
        self._error = error
        self._count = 0
        self._places: Counter[tuple[CodeType, str, int]] | None = None

    def raise_there(self, frame, event, _):
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if self._places is None:
            if name.startswith("coordd") and self._begins(frame):
                self._places = Counter()
            return self.trace if name.startswith("coordd") else None
        if not name.startswith(("coordd", *ELSEWHERE)):
            return None
        place = (code, event, frame.f_lineno) if self._every else (code, "", 0)
        if event in {"call", "line"} and self._places[place] < (TIMES if self._every else 1):
            self._places[place] += 1
            self._count += 1
            if self._count > self._number and not self.where:
                self.where = f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
                raise self._error
        return self.trace if self._every else None


def handlers(**options) -> Iterator[Handler]:
    """Yields a handler for each place in turn; its user runs a job with it before it takes the next one."""
    for number in itertools.count():
        handler = Handler(number, **options)
        yield handler
        if not handler.where:
            return
        if number % 16 == 0:  # jobs that have failed leave cycles with open descriptors
            gc.collect()


def _of_torch(function):
    scope = {**function.__globals__, "__name__": "torch.utils.data"}
    return FunctionType(function.__code__, scope, function.__name__)
