"""Cutting a stream of bytes into lines, wherever the reads happen to split it.

One rule: the pieces depend on the bytes alone, never on how they were chunked. Only `Lines.flush`, called when a stream
falls quiet, hands out an unfinished line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Lines", "Piece"]

# A carriage return at the very end may be half of a "\r\n", so it has to wait for the next byte.
_LINE = re.compile(rb"([^\r\n]*+)(\n|\r\n|\r(?=[^\n]))")


class Piece(NamedTuple):
    """Some text and what came after it: a newline, a carriage return (the line will be redrawn), or nothing yet."""

    text: bytes
    end: bytes


class Lines:
    """Cuts a stream into pieces of at most ``limit`` bytes of text."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""

    @property
    def unfinished(self) -> bool:
        """Whether text waits for the end of its line."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> list[Piece]:
        """Takes the next bytes and hands out what is complete."""
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
        """Hands out what is there although its line has not ended."""
        rest, self._rest = self._rest, b""
        text = rest.removesuffix(b"\r")
        return [Piece(text, rest[len(text) :])] if rest else []

    def _full(self) -> list[Piece]:
        """Takes pieces of exactly the limit off a line that is too long."""
        pieces = []
        while len(self._rest.removesuffix(b"\r")) >= self._limit:
            pieces.append(Piece(self._rest[: self._limit], b""))
            self._rest = self._rest[self._limit :]
        return pieces
