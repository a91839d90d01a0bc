"""Frames from a rank's process to `coordd run`: one line each on standard error, which the MPI launcher forwards.

One rule: a frame is a single write of at most `LIMIT` bytes that ends in a newline. Every MPI launcher forwards
standard error from every host, so no port has to be opened and no secret passed. MPI launchers split the forwarded
output at arbitrary read boundaries; on Linux `whole` makes one read return one write, so that frames of different ranks
do not interleave.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import NamedTuple

from coordd.launch.lines import Piece
from coordd.launch.outcome import Outcome

__all__ = ["LIMIT", "TEXT", "Ended", "Frame", "Output", "Started", "Waiting", "decode", "encode", "whole"]

LIMIT = 2048  # below every launcher's read size (Open MPI: 4096) and below the size of an atomic pipe write
TEXT = LIMIT - 64  # bytes available for a piece of output

_MARK = b"\x1ecoordd"
_FIELD = b"\x1f"
_ENDS = {b"\n": b"n", b"\r": b"r", b"": b"p"}
_CLOSERS = {letter: end for end, letter in _ENDS.items()}


class Output(NamedTuple):
    """A piece of the output of a rank's command; ``stream`` is 1 (stdout) or 2 (stderr)."""

    rank: int
    stream: int
    piece: Piece


class Started(NamedTuple):
    """A rank's command has started; local rank 0 of a host adds a note on how its ranks share the cores."""

    rank: int
    host: str
    note: str = ""


class Ended(NamedTuple):
    """A rank's command has ended."""

    rank: int
    outcome: Outcome


class Waiting(NamedTuple):
    """A rank's command has been in `init` for a while, or, with ``over``, is there no longer."""

    rank: int
    over: bool = False


Frame = Output | Started | Waiting | Ended


def encode(frame: Frame) -> bytes:
    """Encodes a frame as one line."""
    if isinstance(frame, Output):
        fields = [b"%d" % frame.stream + _ENDS[frame.piece.end], frame.piece.text]
    elif isinstance(frame, Started):
        fields = [b"s", frame.host.encode(), frame.note.encode()]
    elif isinstance(frame, Waiting):
        fields = [b"w", b"%d" % frame.over]
    else:
        fields = [b"f", _written(frame.outcome)]
    return _FIELD.join([_MARK, b"%d" % frame.rank, *fields]) + b"\n"


def _written(outcome: Outcome) -> bytes:
    numbers = (b"%d" % number for number in (*outcome[:4], *outcome[6:]))
    texts = (outcome.exception, outcome.last)
    words = (text.encode(errors="replace").translate(None, b"\n" + _FIELD)[: TEXT // 2] for text in texts)
    return _FIELD.join([*numbers, *words])


def decode(line: bytes) -> Frame | None:
    """Decodes a line without its newline; returns ``None`` for other output, such as that of the MPI launcher."""
    if not line.startswith(_MARK + _FIELD):
        return None
    try:
        _, rank, kind, payload = line.split(_FIELD, 3)
        return _read(int(rank), kind, payload)
    except (KeyError, ValueError):  # a torn frame, where `whole` has no effect: show it rather than lose it
        return None


def _read(rank: int, kind: bytes, payload: bytes) -> Frame:
    if kind == b"s":
        host, note = payload.decode().split("\x1f")
        return Started(rank, host, note)
    if kind == b"w":
        return Waiting(rank, payload == b"1")
    if kind == b"f":
        *numbers, exception, last = payload.decode(errors="replace").split("\x1f")
        code, signal, *flags = map(int, numbers)
        told, consequence, *rest = map(bool, flags)
        return Ended(rank, Outcome(code, signal, told, consequence, exception, last, *rest))
    return Output(rank, int(kind[:1]), Piece(payload, _CLOSERS[kind[1:]]))


def whole(descriptor: int) -> None:
    """Puts a pipe into packet mode where the OS supports it: one read returns one write, never parts of two."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and hasattr(os, "O_DIRECT"):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
