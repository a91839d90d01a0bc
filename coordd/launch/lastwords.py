"""What a process said last on standard error: usually its exception."""

from __future__ import annotations

from coordd.launch.lines import Piece

__all__ = ["LastWords"]

_MEMORY = 60  # lines after which an exception was survived, and so is not how the process ended
_CONSEQUENCES = {"PeerError", "ShutdownError"}
_CONFESSION = "the job has failed: this rank "  # what `coordd.api` says on the rank that is to blame
_TESTIMONY = "coordd.errors.PeerError: "  # what `coordd.testimony` says in place of a traceback
_FIRST = ("Traceback (most recent call last):", '  File "')  # a SyntaxError comes without the first


class LastWords:
    """Follows standard error piece by piece, in constant memory.

    Attributes:
        exception: the line that names the last exception, or what this rank is to blame for, or nothing.
        last: the last line of any kind, or nothing.
        consequence: whether the exception came of another rank's failure, or while that was handled.
    """

    def __init__(self) -> None:
        self.exception = ""
        self.last = ""
        self.consequence = False
        self._line = b""
        self._in_traceback = False
        self._age = 0

    def hear(self, piece: Piece) -> None:
        """Takes the next piece."""
        self._line += piece.text[: 4096 - len(self._line)]
        if piece.end == b"\n":
            self._read(self._line.decode(errors="replace").rstrip())
        if piece.end:
            self._line = b""

    def _read(self, line: str) -> None:
        if not line:
            return
        self.last = line
        self._age += 1
        if self._age > _MEMORY:
            self.exception, self.consequence = "", False
        if _CONFESSION in line:
            self._keep("it " + line.partition(_CONFESSION)[2], consequence=False)
        elif line.startswith(_FIRST):
            self._in_traceback = True
        elif line.startswith(("Fatal Python error:", _TESTIMONY)) or (self._in_traceback and not line[0].isspace()):
            name = line.partition(":")[0].rpartition(".")[2]
            self._keep(line, consequence=self.consequence or name in _CONSEQUENCES)

    def _keep(self, line: str, *, consequence: bool) -> None:
        self.exception, self.consequence = line, consequence
        self._in_traceback = False
        self._age = 0
