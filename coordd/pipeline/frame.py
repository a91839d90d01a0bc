"""Frame: a value sent between stages, as one self-describing array of bytes.

A frame is a head, followed by the bytes of each tensor, each at a multiple of 64::

    b"coordd-f" | bytes of the head | bytes of the frame | head | tensor | tensor | ...

The head is a pickle: for each tensor the dtype, the shape, the order of its axes in memory, the form in which it is
stored and whether gradients flow through it; and the pickled structure of the value, in which numbers stand for
tensors. So any value that can be pickled can be sent: tuples, dictionaries, dataclasses, None, numbers, a model's own
output classes. A tensor that occurs twice arrives as one tensor. Like every pickle, a frame must come from a trusted
source: here a rank of the same job.

A gradient frame is the frame of a list with a gradient, or None, for each tensor of the forward frame, in its order.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from coordd.errors import ArgumentError
from coordd.ops.dtypes import dtype_of
from coordd.pipeline.pickling_diagnosis import culprit
from coordd.pipeline.storage import FORMS, PLAIN, Stored, laid, plain
from coordd.transport.shared_memory.loans import blank

__all__ = ["Codec", "joined", "pack", "parted", "unpack"]

_MAGIC = b"coordd-f"
_START = struct.Struct("<8sQQ")
_ALIGNMENT = 64
_LEAST_ALIGNMENT = 16  # the least that any allocator gives, and enough for a tensor's widest dtype


class Codec(Protocol):
    """The operations on a framework's tensors, and on memory, that a frame needs."""

    def blank(self, nbytes: int) -> np.ndarray:
        """Allocates flat memory for a frame, aligned to 64 bytes, uninitialised."""

    def is_tensor(self, value: object) -> bool:
        """Returns whether a value is a tensor."""

    def differentiable(self, tensor: Any) -> bool:
        """Returns whether gradients flow through a tensor."""

    def array(self, tensor: Any) -> np.ndarray:
        """Returns a tensor's values: a view, if its memory can be viewed."""

    def tensor(self, array: np.ndarray, *, differentiable: bool) -> Any:
        """Returns a tensor, without autograd history, in an array's memory."""


class _Entry(NamedTuple):
    """A tensor's entry in the head."""

    form: str
    dtype: str
    shape: tuple[int, ...]  # of the array as it lies in memory
    axes: tuple[int, ...]  # which of them is the tensor's first, second, ...
    differentiable: bool

    @property
    def nbytes(self) -> int:
        return FORMS[self.form].nbytes(dtype_of(self.dtype), int(np.prod(self.shape, dtype=np.int64)))


def pack(
    value: Any, codec: Codec, *, compress: Callable[[Any], str | None] | None = None
) -> tuple[np.ndarray, list[Any]]:
    """Creates a frame; each tensor is copied once.

    Args:
        value: any picklable value, with tensors anywhere in it.
        codec: of the framework that the tensors belong to.
        compress: returns the form in which a tensor is to be stored, ``"bf16"`` or ``"int8"``, or None for unchanged.
            Tensors that a form does not support (integers, few values, infinite ones) are stored unchanged.

    Returns:
        The frame, of uint8, and the tensors in the order in which they lie in it.

    Raises:
        ArgumentError: a part of the value cannot be pickled; the error names it and its path.
    """
    structure, tensors = parted(value, codec)
    entries, parts = [], []
    for tensor in tensors:
        entry, part = _entry(tensor, codec, compress)
        entries.append(entry)
        parts.append(part)
    head = pickle.dumps(([tuple(entry) for entry in entries], structure), protocol=5)
    places, total = _places(len(head), [part.nbytes for part in parts])
    frame = codec.blank(total)
    frame[: _START.size] = np.frombuffer(_START.pack(_MAGIC, len(head), total), np.uint8)
    frame[_START.size : _START.size + len(head)] = np.frombuffer(head, np.uint8)
    for place, part in zip(places, parts, strict=True):
        part.write(frame[place : place + part.nbytes])
    return frame, tensors


def unpack(frame: np.ndarray, codec: Codec) -> tuple[Any, list[Any]]:
    """Reads a frame; tensors stored in the plain form are views of its memory.

    A frame that is not aligned to 16 bytes in memory is copied first, because tensors must be aligned.

    Returns:
        The value, and the tensors in the order in which they lie in the frame.

    Raises:
        ArgumentError: the array is not a frame, or is truncated.
    """
    head = _head(frame)
    if frame.ctypes.data % _LEAST_ALIGNMENT:
        frame = _aligned(frame)
    listed, structure = pickle.loads(head)  # noqa: S301 - from a rank of this job
    entries = [_Entry(*entry) for entry in listed]
    places, _ = _places(len(head), [entry.nbytes for entry in entries])
    tensors = []
    for place, entry in zip(places, entries, strict=True):
        stored = frame[place : place + entry.nbytes]
        array = FORMS[entry.form].read(stored, dtype_of(entry.dtype), entry.shape).transpose(entry.axes)
        tensors.append(codec.tensor(array, differentiable=entry.differentiable))
    return joined(structure, tensors), tensors


def parted(value: Any, codec: Codec) -> tuple[bytes, list[Any]]:
    """Separates a value into its structure and its tensors, each once, in the order in which they occur.

    Raises:
        ArgumentError: a part of the value cannot be pickled; the error names it and its path.
    """
    pickler = _Pickler(codec)
    try:
        pickler.dump(value)
    except Exception as error:
        path, found = culprit(value, lambda part: _Pickler(codec).dump(part))
        kind = f"{type(found).__module__}.{type(found).__qualname__}"
        raise ArgumentError(f"{path}, of type {kind}, cannot travel between stages: {error}") from error
    return pickler.file.getvalue(), pickler.tensors


def joined(structure: bytes, tensors: Sequence[Any]) -> Any:
    """Rebuilds a value from its structure, with these tensors in place of the original ones."""
    return _Unpickler(structure, tensors).load()


class _Pickler(pickle.Pickler):
    """Replaces tensors by numbers, and collects the tensors."""

    def __init__(self, codec: Codec) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5)
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._is_tensor = codec.is_tensor

    def persistent_id(self, obj: Any) -> int | None:
        if not self._is_tensor(obj):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class _Unpickler(pickle.Unpickler):
    """Replaces numbers by tensors."""

    def __init__(self, structure: bytes, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Any:
        return self._tensors[pid]


def _entry(tensor: Any, codec: Codec, compress: Callable[[Any], str | None] | None) -> tuple[_Entry, Stored]:
    # The axes travel, too: a transposed tensor received in another memory order could not be viewed as the sender's
    # can.
    array, axes = laid(codec.array(tensor))
    form = (compress and compress(tensor)) or PLAIN
    if form not in FORMS:
        raise ArgumentError(f"there is no form {form!r}; there are {', '.join(sorted(FORMS.keys() - {PLAIN}))}")
    part = FORMS[form].stored(array)
    if part is None:
        form, part = PLAIN, plain(array)
    return _Entry(form, array.dtype.name, array.shape, axes, codec.differentiable(tensor)), part


def _aligned(frame: np.ndarray) -> np.ndarray:
    copy = blank(len(frame))
    copy[:] = frame
    return copy


def _places(head: int, sizes: list[int]) -> tuple[list[int], int]:
    """Returns where each tensor starts, and the length of the whole frame."""
    places, end = [], _START.size + head
    for size in sizes:
        places.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = places[-1] + size
    return places, end


def _head(frame: np.ndarray) -> bytes:
    if frame.dtype != np.uint8 or frame.ndim != 1 or not frame.flags.c_contiguous:
        raise ArgumentError(f"a frame is a contiguous row of bytes, not {frame.dtype} of shape {frame.shape}")
    if len(frame) < _START.size:
        raise ArgumentError(f"a frame has at least {_START.size} bytes, this one has {len(frame)}")
    magic, head, total = _START.unpack(frame[: _START.size].tobytes())
    if magic != _MAGIC:
        raise ArgumentError(f"these {len(frame)} bytes are no frame: they start with {magic!r}, not {_MAGIC!r}")
    if len(frame) != total:
        raise ArgumentError(f"this frame was packed with {total} bytes, {len(frame)} have come")
    return frame[_START.size : _START.size + head].tobytes()
