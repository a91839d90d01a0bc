"""What travels instead of a gradient: itself, or the same in sixteen bits.

The values are added in fp32 whatever travels.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor(Protocol):
    """A way to make a tensor smaller, and back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns what travels, and what `decompress` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the tensor in its own type."""
        ...


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:  # noqa: ARG004 - the protocol's
        """Returns the tensor itself."""
        return tensor


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype | None]:
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize <= dtype.itemsize:
        return tensor, None
    return tensor.to(dtype), tensor.dtype


def _back(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
    return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor:
    """Halves fp32: eleven bits of precision, values up to 65504."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor in fp16."""
        return _to(tensor, torch.float16)

    decompress = staticmethod(_back)


class BF16Compressor:
    """Halves fp32: eight bits of precision, the range of fp32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor in bf16."""
        return _to(tensor, torch.bfloat16)

    decompress = staticmethod(_back)


class Compression:
    """The compressors, under Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
