"""Forwards a command's output to the launcher as frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from coordd.launch.frames import LIMIT, TEXT, Frame, Output, encode
from coordd.launch.lines import Lines, Piece
from coordd.launch.stderr_tail import LastWords

__all__ = ["Relay"]

_CHUNK = 1 << 16


class Relay:
    """Reads the command's two pipes and writes frames."""

    def __init__(self, rank: int, *, out: int, err: int, write: Callable[[bytes], None]) -> None:
        """Takes over two descriptors.

        Args:
            rank: the rank whose output it is.
            out: the pipe of the command's standard output.
            err: the pipe of its standard error.
            write: takes at most `LIMIT` bytes at a time; raises ``OSError`` if the reader is gone.
        """
        self.words = LastWords()
        self._rank = rank
        self._write = write
        self._numbers = {out: 1, err: 2}
        self._lines = {descriptor: Lines(TEXT) for descriptor in self._numbers}

    @property
    def open(self) -> bool:
        """Whether at least one of the pipes is still open for writing."""
        return bool(self._lines)

    @property
    def unfinished(self) -> bool:
        """Whether a line is unfinished."""
        return any(lines.unfinished for lines in self._lines.values())

    def read(self, descriptor: int) -> bool:
        """Forwards the available output; returns ``False`` if the pipe has ended, which closes it."""
        chunk = os.read(descriptor, _CHUNK)
        if chunk:
            self._pass_on(descriptor, self._lines[descriptor].feed(chunk))
            return True
        self._pass_on(descriptor, self._lines.pop(descriptor).flush())
        os.close(descriptor)
        return False

    def flush(self) -> None:
        """Forwards unfinished lines as they are."""
        for descriptor, lines in self._lines.items():
            self._pass_on(descriptor, lines.flush())

    def say(self, frames: Iterable[Frame]) -> None:
        """Writes frames, packed into writes of at most `LIMIT` bytes."""
        packet = b""
        for line in map(encode, frames):
            if len(packet) + len(line) > LIMIT:
                self._send(packet)
                packet = b""
            packet += line
        self._send(packet)

    def _pass_on(self, descriptor: int, pieces: list[Piece]) -> None:
        stream = self._numbers[descriptor]
        if stream == 2:
            for piece in pieces:
                self.words.hear(piece)
        self.say(Output(self._rank, stream, piece) for piece in pieces)

    def _send(self, packet: bytes) -> None:
        """Writes a packet; once the reader is gone, output is discarded until the command is ended."""
        try:
            if packet:
                self._write(packet)
        except OSError:
            self._write = _nowhere


def _nowhere(_: bytes) -> None:
    return
