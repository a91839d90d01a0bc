"""`Compression`, the registry of compressors, and the elementwise compressors: none, fp16, and bf16.

Values are summed in fp32, in whichever dtype they are sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coordd.errors import ArgumentError
from coordd_torch.compressor import Compressor
from coordd_torch.int8 import Int8Compressor
from coordd_torch.powersgd import PowerSGDCompressor
from coordd_torch.topk import TopKCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "made"]


class NoneCompressor(Compressor):
    """Sends tensors uncompressed."""

    elementwise = True


def _to(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, torch.dtype | None]:
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize <= dtype.itemsize:
        return tensor, None
    return tensor.to(dtype), tensor.dtype


def _back(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
    return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(Compressor):
    """Sends fp32 as fp16: 11 bits of precision, values up to 65504; larger values become infinite on all ranks."""

    elementwise = True

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Returns the tensor in fp16."""
        return _to(tensor, torch.float16)

    decompress = staticmethod(_back)


class BF16Compressor(Compressor):
    """Sends fp32 as bf16: 8 bits of precision, the range of fp32."""

    elementwise = True

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Returns the tensor in bf16."""
        return _to(tensor, torch.bfloat16)

    decompress = staticmethod(_back)


class Compression:
    """The compressors, under Horovod's names; pass a class, or an object created with parameters.

    Once an optimizer has used an object, the object has statistics: ``compression.ratio`` is how many times fewer
    bytes this rank received, and ``compression.error`` how much of this rank's gradients was lost or delayed, from 0 to
    about 1. A class has no statistics, so create an object: ``compression = Compression.bf16()``.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    topk = TopKCompressor
    powersgd = PowerSGDCompressor


class _Foreign(Compressor):
    """A compressor written for Horovod: a class with two functions."""

    def __init__(self, functions: Any) -> None:
        super().__init__()
        self.compress = functions.compress  # type: ignore[method-assign]  # same signature
        self.decompress = functions.decompress  # type: ignore[method-assign]  # same signature


def made(compression: Any) -> Compressor:
    """Returns the compressor object for the value that a user passes as compression.

    Raises:
        ArgumentError: the value is no compression.
    """
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return compression()
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        text = (
            f"compression={compression!r} is no compression: give one of Compression, an object of a subclass of "
            "Compressor, or a class with the functions compress and decompress"
        )
        raise ArgumentError(text)
    return _Foreign(compression)
