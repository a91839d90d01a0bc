"""Extracts the last error from a process's standard error, usually its exception."""

from __future__ import annotations

import re

from coordd.launch.lines import Piece
from coordd.launch.tracebacks import TESTIMONY, traceback_at

__all__ = ["LastWords"]

_RANK = re.compile(rb"^\[rank\d+\]:\s?")
"""The prefix that PyTorch puts before each line of a traceback in a process of a process group."""
_CHATTER = re.compile(rb"[IW]\d{4} \d\d:|WARNING: All log messages before absl::InitializeLog")
"""Information and warnings that TensorFlow's libraries log; never the reason why a process ended."""
_MEMORY = 60  # lines after which an exception counts as handled, so that it is not the cause of the exit
_CONSEQUENCES = {"PeerError", "RefusedError", "ShutdownError"}
_CONFESSION = "the job has failed: this rank "  # printed by `coordd.api` on the rank that caused the failure
_OUTRIGHT = ("Fatal Python error:", TESTIMONY.decode())  # errors that are printed without a traceback before them


class LastWords:
    """Parses standard error piece by piece, in constant memory.

    Attributes:
        exception: the line that names the last exception, or the failure that this rank caused, or "".
        last: the last line of any kind, or "".
        consequence: whether the exception was caused by another rank's failure, or raised while that was handled.
    """

    def __init__(self) -> None:
        self.exception = ""
        self.last = ""
        self.consequence = False
        self._line = b""
        self._margin: str | None = None
        self._age = 0

    def hear(self, piece: Piece) -> None:
        """Processes the next piece."""
        self._line += piece.text[: 4096 - len(self._line)]
        if piece.end == b"\n":
            self._read(self._line.rstrip())
        if piece.end:
            self._line = b""

    def _read(self, said: bytes) -> None:
        if not said or _CHATTER.match(said):
            return
        said = _RANK.sub(b"", said)
        self.last = line = said.decode(errors="replace")
        self._age += 1
        if self._age > _MEMORY:
            self.exception, self.consequence = "", False
        if _CONFESSION in line:
            self._keep("it " + line.partition(_CONFESSION)[2], consequence=False)
        elif (begin := traceback_at(said)) is not None:
            self._margin = _margin(said[begin:])
        elif line.startswith(_OUTRIGHT):
            self._name(line)
        elif self._margin is not None and line.startswith(self._margin):
            text = line.removeprefix(self._margin)
            if text.strip("^~ ") and not text[0].isspace():
                self._name(text)

    def _name(self, exception: str) -> None:
        name = exception.partition(":")[0].rpartition(".")[2]
        self._keep(exception, consequence=self.consequence or name in _CONSEQUENCES)

    def _keep(self, line: str, *, consequence: bool) -> None:
        self.exception, self.consequence = line, consequence
        self._margin = None
        self._age = 0


def _margin(first: bytes) -> str:
    """Returns the prefix of a traceback's lines, from its first line.

    The errors in an exception group are indented more than the group itself.
    """
    indent, plus, _ = first.partition(b"+ Exception Group ")
    return f"{indent.decode()}| " if plus else ""
