"""Hands a command's output to the launcher, frame by frame."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from coordd.launch.frames import LIMIT, TEXT, Frame, Output, encode
from coordd.launch.lastwords import LastWords
from coordd.launch.lines import Lines, Piece

__all__ = ["Relay"]

_CHUNK = 1 << 16


class Relay:
    """Reads the command's two pipes and writes frames."""

    def __init__(self, rank: int, *, out: int, err: int, write: Callable[[bytes], None]) -> None:
        """Takes over two descriptors.

        Args:
            rank: whose output it is.
            out: the pipe of the command's standard output.
            err: the pipe of its standard error.
            write: takes at most `LIMIT` bytes at a time; raises ``OSError`` if nobody listens any more.
        """
        self.words = LastWords()
        self._rank = rank
        self._write = write
        self._numbers = {out: 1, err: 2}
        self._lines = {descriptor: Lines(TEXT) for descriptor in self._numbers}

    @property
    def open(self) -> bool:
        """Whether anybody can still write to one of the pipes."""
        return bool(self._lines)

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun and not ended."""
        return any(lines.unfinished for lines in self._lines.values())

    def read(self, descriptor: int) -> bool:
        """Passes on what can be read now; ``False`` says that the pipe has ended and was closed."""
        chunk = os.read(descriptor, _CHUNK)
        if chunk:
            self._pass_on(descriptor, self._lines[descriptor].feed(chunk))
            return True
        self._pass_on(descriptor, self._lines.pop(descriptor).flush())
        os.close(descriptor)
        return False

    def flush(self) -> None:
        """Passes on unfinished lines as they are."""
        for descriptor, lines in self._lines.items():
            self._pass_on(descriptor, lines.flush())

    def say(self, frames: Iterable[Frame]) -> None:
        """Writes frames, as many at a time as fit."""
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
        """Writes, unless nobody listens any more; then the command may go on talking to itself until it is ended."""
        try:
            if packet:
                self._write(packet)
        except OSError:
            self._write = _nowhere


def _nowhere(_: bytes) -> None:
    return
