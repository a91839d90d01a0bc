"""Silences stderr for one thread only, because the daemon's warnings must stay visible."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

__all__ = ["hushed"]


@contextlib.contextmanager
def hushed(*loggers: str) -> Iterator[None]:
    """Drops this thread's writes to `sys.stderr`, and all messages of these loggers."""
    silent = [logger for logger in map(logging.getLogger, loggers) if not logger.disabled]
    for logger in silent:
        logger.disabled = True
    try:
        with contextlib.redirect_stderr(_Others(sys.stderr)):
            yield
    finally:
        for logger in silent:
            logger.disabled = False


class _Others(io.TextIOBase):
    """The stream for all threads except the one that creates this object."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._hushed = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._hushed else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()
