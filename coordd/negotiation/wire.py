"""Encodes messages: typed msgpack, validated while decoding; large ones are compressed.

Nothing that arrives is ever executed or unpickled; bytes that do not match the types are rejected.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from coordd.errors import CoorddError
from coordd.ops.messages import Announcement, Message, Report

__all__ = ["MAX_MESSAGE", "Batch", "Scribe", "WireError", "bits", "decode", "encode", "forget", "mask"]

MAX_MESSAGE = 16 << 20
"""Largest control message in bytes, before compression."""

_LARGE = 4 << 10
_MANY = 32
_COMPRESSED = b"\x78"
"""The first byte of a zlib stream; a message is an array, whose first byte is never this one."""


class Batch(tuple[Announcement, ...]):  # noqa: SLOT001 - it has to remember its bytes
    """Many announcements, encoded only once: the bytes identify equal batches, and are forwarded as they are."""

    @cached_property
    def data(self) -> bytes:
        """Compressed msgpack."""
        return _compress(_pack(tuple(self)))


class _Sealed(msgspec.Struct, frozen=True, array_like=True, tag="sealed"):
    """A report whose announcements are a batch."""

    report: Report
    batch: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message | _Sealed] = msgspec.msgpack.Decoder(Message | _Sealed)
_batch_decoder: msgspec.msgpack.Decoder[tuple[Announcement, ...]] = msgspec.msgpack.Decoder(tuple[Announcement, ...])


class WireError(CoorddError):
    """Bytes that are not a message."""


def encode(message: Message) -> bytes:
    """Encodes a message.

    Raises:
        WireError: the message is larger than `MAX_MESSAGE`.
    """
    if type(message) is Report and len(message.fresh) >= _MANY:
        batch = message.fresh if isinstance(message.fresh, Batch) else Batch(message.fresh)
        return _pack(_Sealed(msgspec.structs.replace(message, fresh=()), batch.data))
    data = _pack(message)
    return data if len(data) < _LARGE else _compress(data)


class Scribe:
    """Encodes messages for a sender; a message to many ranks is encoded once."""

    def __init__(self) -> None:
        self._last: Message | None = None
        self._data = b""

    def encode(self, message: Message) -> bytes:
        """Encodes a message; see `encode`."""
        if message is not self._last:
            self._data, self._last = encode(message), message
        return self._data


def _pack(value: Any) -> bytes:
    try:
        data = _encoder.encode(value)
    except UnicodeEncodeError:
        data = _encoder.encode(_escaped(value))
    if len(data) > MAX_MESSAGE:
        text = f"a {type(value).__name__} of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}"
        raise WireError(text)
    return data


def _escaped(value: Any) -> Any:
    """Escapes text that is not Unicode: a path that is not UTF-8, in a stack or an error, must not silence a rank."""
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
    """Decodes a message.

    Raises:
        WireError: the bytes are not a message.
    """
    if len(data) > MAX_MESSAGE:
        text = f"{len(data)} bytes exceed the limit of {MAX_MESSAGE}"
        raise WireError(text)
    try:
        found = _decoder.decode(_expand(data) if data[:1] == _COMPRESSED else data)
        if isinstance(found, _Sealed):
            return msgspec.structs.replace(found.report, fresh=_unseal(found.batch))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, zlib.error) as error:
        raise WireError(str(error)) from error
    return found


@lru_cache(maxsize=4)
def _unseal(data: bytes) -> Batch:
    """Decodes a batch; equal batches of many ranks are decoded once."""
    batch = Batch(_batch_decoder.decode(_expand(data)))
    batch.data = data
    return batch


def forget() -> None:
    """Clears the cache of decoded batches; for benchmarks of decoding."""
    _unseal.cache_clear()


def _compress(data: bytes) -> bytes:
    return zlib.compress(data, level=1)


def _expand(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    found = stream.decompress(data, MAX_MESSAGE)
    if stream.unconsumed_tail or not stream.eof:
        text = f"{len(data)} compressed bytes are cut off, or exceed the limit of {MAX_MESSAGE}"
        raise WireError(text)
    return found


def mask(number: int) -> bytes:
    """Encodes a bit mask, lowest byte first."""
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def bits(number: int) -> Iterator[int]:
    """Yields the positions of the set bits, ascending."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low
