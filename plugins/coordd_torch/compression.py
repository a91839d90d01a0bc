"""The compressions under their names, and those that keep numbers as numbers: themselves, or the same in sixteen bits.

The values are added in fp32 whatever travels.
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
    """Leaves tensors as they are."""

    elementwise = True


def _to(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, torch.dtype | None]:
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize <= dtype.itemsize:
        return tensor, None
    return tensor.to(dtype), tensor.dtype


def _back(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
    return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(Compressor):
    """Halves fp32: eleven bits of precision, values up to 65504; what is larger becomes infinite on all ranks."""

    elementwise = True

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Returns the tensor in fp16."""
        return _to(tensor, torch.float16)

    decompress = staticmethod(_back)


class BF16Compressor(Compressor):
    """Halves fp32: eight bits of precision, the range of fp32."""

    elementwise = True

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Returns the tensor in bf16."""
        return _to(tensor, torch.bfloat16)

    decompress = staticmethod(_back)


class Compression:
    """The compressors, under Horovod's names; each may be given as it is, or as an object made with its parameters.

    An object tells what it does, once an optimizer has used it: ``compression.ratio``, how many times fewer bytes have
    come to this rank, and ``compression.error``, how much of this rank's gradients was lost or is late, from 0 to 1.
    A class cannot: ``compression = Compression.bf16()`` makes the object to give and to ask.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    topk = TopKCompressor
    powersgd = PowerSGDCompressor


class _Foreign(Compressor):
    """A compressor that was written for Horovod: two functions."""

    def __init__(self, functions: Any) -> None:
        super().__init__()
        self.compress = functions.compress  # type: ignore[method-assign]  # called alike
        self.decompress = functions.decompress  # type: ignore[method-assign]  # called alike


def made(compression: Any) -> Compressor:
    """Makes an object of whatever a user may give as a compression.

    Raises:
        ArgumentError: it is none.
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
