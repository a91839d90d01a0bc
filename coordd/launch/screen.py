"""Shows the output of all ranks, each line whole and under its rank.

One rule: a line that is not finished, such as a progress bar, is drawn in place on a terminal and taken away again when
another line comes. Where there is no terminal nothing can be taken away, so it is written when it is finished, and in
between every few seconds if it is one that redraws itself. Tracebacks wait a moment for others that are the same.
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
_SNAPSHOT = 10.0  # seconds between two looks at a progress bar where there is no terminal
_LONGEST = 1 << 16  # bytes after which a line counts as finished, whatever its rank thinks


class Sink:
    """One of our two standard streams.

    Attributes:
        terminal: whether it is one, so that what was written can be taken away.
        colour: whether it shows colours.
        columns: the width of the terminal.
        closed: whether its reader has gone away.
    """

    def __init__(self, file: IO[bytes], *, terminal: bool, colour: bool = False, columns: int = 80) -> None:
        self.terminal = terminal
        self.colour = colour
        self.columns = columns
        self.closed = False
        self._file = file

    def write(self, data: bytes) -> None:
        """Writes at once; without a reader it does nothing."""
        if self.closed:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except BrokenPipeError:
            self.closed = True
            self._forget()

    def _forget(self) -> None:
        """Lets go of what nobody will read; Python would try to write it at its end, and end with another exit code."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)


class _Line:
    """The line that one stream of one rank is writing."""

    def __init__(self, now: float) -> None:
        self.text = b""
        self.redrawn = False
        self.returned = False
        self.shown_at = now

    def add(self, text: bytes, end: bytes) -> bool:
        """Writes as a terminal would; tells whether the line is finished."""
        if self.returned and text:
            self.text, self.returned = b"", False
        self.text += text
        if end == b"\r":
            self.redrawn = self.returned = True
        return end == b"\n" or len(self.text) > _LONGEST

    def take(self) -> bytes:
        """Hands the line out and begins the next one."""
        text, self.text = self.text, b""
        self.redrawn = self.returned = False
        return text


class Screen:
    """Shows pieces of output."""

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
            out: where the ranks' standard output goes.
            err: where their standard error goes.
            prefix: whether to put the rank before each line.
            logs: takes every line too.
            clock: seconds from any start.
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
        """Whether nobody reads our standard output any more."""
        return self._sinks[1].closed

    @property
    def due(self) -> float:
        """When `settle` has something to show, in seconds of the clock."""
        return self._tracebacks.due

    def settle(self) -> None:
        """Shows the tracebacks that have waited long enough."""
        if self._clock() >= self.due:
            self._release()

    def show(self, output: Output) -> None:
        """Shows a piece of a rank's output."""
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
        """Writes a line of the launcher itself to standard error."""
        self._write(2, text.encode(errors="replace") + b"\n")

    def pass_on(self, stream: int, line: bytes) -> None:
        """Writes a line that no rank but the MPI launcher wrote."""
        self._write(stream, line + b"\n")

    def finish(self) -> None:
        """Writes the lines that will not be finished any more, and all that has waited."""
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
            self._write(stream, self._titled(key, text[:begin]) + b"\n")  # a progress bar that it has interrupted
            text = text[begin:]
        if stream == 2 and self._tracebacks.keep(rank, text, now=self._clock()):
            self._write(stream, b"")
            return
        if rank in self._tracebacks:
            self._release()  # for what a rank says on its two streams stays in order
        self._write(stream, self._titled(key, text) + b"\n")

    def _release(self) -> None:
        for (first, *others), lines in self._tracebacks.release():
            self._write(2, b"".join(self._titled((first, 2), line) + b"\n" for line in lines))
            if others:
                self.say(f"coordd: the same on rank{'s' * (len(others) > 1)} {spans(others)}")

    def _write(self, stream: int, data: bytes) -> None:
        """Writes whole lines; the one that is being drawn moves below them."""
        self._erase()
        self._sinks[stream].write(data)
        self._draw()

    def _move(self, key: tuple[int, int]) -> None:
        """Draws another line, or the same one if it has changed."""
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
