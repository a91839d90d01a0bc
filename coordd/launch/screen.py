"""Prints the output of all ranks, each line in one piece and prefixed with its rank.

One rule: on a terminal, an unfinished line, such as a progress bar, is drawn in place and erased when another line is
printed. Other outputs cannot erase, so there it is written when it is finished and, if it redraws itself, also every
few seconds. Tracebacks are held briefly to merge equal ones.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import IO

from coordd.errors import spans
from coordd.launch.frames import Output
from coordd.launch.logs import Logs
from coordd.launch.tracebacks import Tracebacks, traceback_at

__all__ = ["Screen", "Sink"]

_COLOURS = ("36", "33", "32", "35", "34", "31")
_CLEAR = b"\r\x1b[2K"
_SNAPSHOT = 10.0  # seconds between two copies of a progress bar if the output is not a terminal
_LONGEST = 1 << 16  # bytes after which a line counts as finished


class Sink:
    """Standard output or standard error of this process.

    Attributes:
        terminal: whether the stream is a terminal, which can erase lines.
        colour: whether it shows colours.
        columns: the width of the terminal.
        closed: whether its reader is gone.
    """

    def __init__(self, file: IO[bytes], *, terminal: bool, colour: bool = False, columns: int = 80) -> None:
        self.terminal = terminal
        self.colour = colour
        self.columns = columns
        self.closed = False
        self._file = file

    def write(self, data: bytes) -> None:
        """Writes and flushes; does nothing once the reader is gone."""
        if self.closed:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except BrokenPipeError:
            self.closed = True
            self._forget()

    def _forget(self) -> None:
        """Redirects the stream to /dev/null; else Python's flush at exit would fail and change the exit code."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)


class _Line:
    """The current unfinished line of one stream of one rank."""

    def __init__(self, now: float) -> None:
        self.text = b""
        self.redrawn = False
        self.returned = False
        self.shown_at = now

    def add(self, text: bytes, end: bytes) -> bool:
        """Adds text as a terminal would; returns whether the line is finished."""
        if self.returned and text:
            self.text, self.returned = b"", False
        self.text += text
        if end == b"\r":
            self.redrawn = self.returned = True
        return end == b"\n" or len(self.text) > _LONGEST

    def take(self) -> bytes:
        """Returns the line and starts the next one."""
        text, self.text = self.text, b""
        self.redrawn = self.returned = False
        return text


class Screen:
    """Prints the pieces of output of all ranks."""

    def __init__(
        self,
        out: Sink,
        err: Sink,
        *,
        prefix: bool = True,
        logs: Logs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the screen.

        Args:
            out: stream for the ranks' standard output.
            err: stream for the ranks' standard error.
            prefix: whether to print the rank before each line.
            logs: log files that get every line too.
            clock: returns the time in seconds, from any origin.
        """
        self._sinks = {1: out, 2: err}
        self._prefix = prefix
        self._logs = logs
        self._clock = clock
        self._lines: dict[tuple[int, int], _Line] = {}
        self._live: tuple[int, int] | None = None
        self._drawn = b""
        self._tracebacks = Tracebacks()

    @property
    def closed(self) -> bool:
        """Whether the reader of standard output is gone."""
        return self._sinks[1].closed

    @property
    def due(self) -> float:
        """Time at which `settle` next has tracebacks to print, in seconds of the clock."""
        return self._tracebacks.due

    def settle(self) -> None:
        """Prints the held tracebacks if their time has come."""
        if self._clock() >= self.due:
            self._release()

    def show(self, output: Output) -> None:
        """Prints a piece of a rank's output."""
        key = output.rank, output.stream
        if key not in self._lines:
            self._lines[key] = _Line(self._clock())
        line = self._lines[key]
        if line.add(*output.piece):
            self._finish(key, line)
        elif self._sinks[output.stream].terminal:
            self._move(key)
        elif line.redrawn and line.text and self._clock() - line.shown_at >= _SNAPSHOT:
            line.shown_at = self._clock()
            self._write(output.stream, self._titled(key, line.text) + b"\n")

    def say(self, text: str) -> None:
        """Writes a line of coordd itself to standard error."""
        self._write(2, text.encode(errors="replace") + b"\n")

    def pass_on(self, stream: int, line: bytes) -> None:
        """Writes a line of the MPI launcher."""
        self._write(stream, line + b"\n")

    def finish(self) -> None:
        """Writes the unfinished lines and the held tracebacks, at the end of the job."""
        for key, line in sorted(self._lines.items()):
            if line.text:
                self._finish(key, line)
        self._release()

    def _finish(self, key: tuple[int, int], line: _Line) -> None:
        rank, stream = key
        text = line.take()
        if self._logs:
            self._logs.write(rank, text)
        if stream == 2 and rank not in self._tracebacks and (begin := traceback_at(text)):
            self._write(stream, self._titled(key, text[:begin]) + b"\n")  # a progress bar before the traceback
            text = text[begin:]
        if stream == 2 and self._tracebacks.keep(rank, text, now=self._clock()):
            self._write(stream, b"")
            return
        if rank in self._tracebacks:
            self._release()  # keeps the order of a rank's two streams
        self._write(stream, self._titled(key, text) + b"\n")

    def _release(self) -> None:
        for (first, *others), lines in self._tracebacks.release():
            self._write(2, b"".join(self._titled((first, 2), line) + b"\n" for line in lines))
            if others:
                self.say(f"coordd: the same on rank{'s' * (len(others) > 1)} {spans(others)}")

    def _write(self, stream: int, data: bytes) -> None:
        """Writes whole lines above the unfinished line."""
        self._erase()
        self._sinks[stream].write(data)
        self._draw()

    def _move(self, key: tuple[int, int]) -> None:
        """Draws another unfinished line, or redraws the present one if it has changed."""
        if key != self._live or self._lines[key].text != self._drawn:
            self._erase()
            self._live = key
            self._draw()

    def _draw(self) -> None:
        if self._live and (text := self._lines[self._live].text):
            rank, stream = self._live
            sink = self._sinks[stream]
            room = sink.columns - 1 - (len(f"[{rank}] ") if self._prefix else 0)
            sink.write(self._titled(self._live, text.decode(errors="replace")[:room].encode()))
            self._drawn = text
        else:
            self._live = None

    def _erase(self) -> None:
        if self._live:
            self._sinks[self._live[1]].write(_CLEAR)

    def _titled(self, key: tuple[int, int], text: bytes) -> bytes:
        rank, stream = key
        if not self._prefix:
            return text
        title = f"[{rank}]"
        if self._sinks[stream].colour:
            title = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{title}\x1b[0m"
        return title.encode() + b" " + text
