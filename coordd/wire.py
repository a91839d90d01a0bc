"""Messages as bytes: typed msgpack, validated while decoding.

Nothing that arrives is ever executed or unpickled; what does not fit the types is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from coordd.errors import CoorddError
from coordd.messages import Message

__all__ = ["MAX_MESSAGE", "WireError", "bits", "decode", "encode", "mask"]

MAX_MESSAGE = 16 << 20
"""Largest control message in bytes."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class WireError(CoorddError):
    """Bytes that are not a message."""


def encode(message: Message) -> bytes:
    """Writes a message.

    Raises:
        WireError: the message is larger than `MAX_MESSAGE`.
    """
    try:
        data = _encoder.encode(message)
    except UnicodeEncodeError:
        data = _encoder.encode(_escaped(message))
    if len(data) > MAX_MESSAGE:
        text = f"a {type(message).__name__} of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}"
        raise WireError(text)
    return data


def _escaped(value: Any) -> Any:
    """Spells out what is not Unicode: a path that is not UTF-8, in a stack or an error, must not silence a rank."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case tuple():
            return tuple(map(_escaped, value))
        case msgspec.Struct():
            return type(value)(*map(_escaped, msgspec.structs.astuple(value)))
        case _:
            return value


def decode(data: bytes) -> Message:
    """Reads a message.

    Raises:
        WireError: the bytes are no message.
    """
    if len(data) > MAX_MESSAGE:
        text = f"{len(data)} bytes exceed the limit of {MAX_MESSAGE}"
        raise WireError(text)
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from error


def mask(number: int) -> bytes:
    """Writes a bit mask, lowest byte first."""
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def bits(number: int) -> Iterator[int]:
    """Lists the positions of the set bits, ascending."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low
