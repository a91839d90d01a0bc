"""Messages as bytes: typed msgpack, validated while decoding.

Nothing that arrives is ever executed or unpickled; what does not fit the types is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        text = f"a {type(message).__name__} of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}"
        raise WireError(text)
    return data


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
