"""Splits a byte stream into lines, independently of the read boundaries.

One rule: the pieces depend on the bytes only, never on the chunks. Only `Lines.flush`, called when a stream is quiet,
returns an unfinished line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Lines", "Piece"]

# A carriage return at the end of the data may be the first half of a "\r\n", so it has to wait for the next byte.
_LINE = re.compile(rb"([^\r\n]*+)(\n|\r\n|\r(?=[^\n]))")


class Piece(NamedTuple):
    """Text and its line end: a newline, a carriage return (the line will be redrawn), or nothing yet."""

    text: bytes
    end: bytes


class Lines:
    """Splits a stream into pieces of at most ``limit`` bytes of text."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""

    @property
    def unfinished(self) -> bool:
        """Whether an unfinished line is buffered."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> list[Piece]:
        """Adds the next bytes and returns the completed pieces."""
        data = self._rest + chunk
        pieces: list[Piece] = []
        done = 0
        while line := _LINE.match(data, done):
            self._rest = line[1]
            pieces += self._full()
            pieces.append(Piece(self._rest, b"\r" if line[2] == b"\r" else b"\n"))
            done = line.end()
        self._rest = data[done:]
        return pieces + self._full()

    def flush(self) -> list[Piece]:
        """Returns the buffered unfinished line, if any."""
        rest, self._rest = self._rest, b""
        text = rest.removesuffix(b"\r")
        return [Piece(text, rest[len(text) :])] if rest else []

    def _full(self) -> list[Piece]:
        """Splits pieces of exactly ``limit`` bytes off a line that is too long."""
        pieces = []
        while len(self._rest.removesuffix(b"\r")) >= self._limit:
            pieces.append(Piece(self._rest[: self._limit], b""))
            self._rest = self._rest[self._limit :]
        return pieces
