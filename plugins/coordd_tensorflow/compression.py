"""What travels instead of a tensor: itself, or the same in sixteen bits. The values are added in fp32 all the same."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coordd.errors import ArgumentError

__all__ = ["Compression", "Compressor", "checked"]


class Compressor:
    """How tensors become smaller on their way; subclass it for one more way.

    What `compress` makes of a tensor, number for number, is added up, and `decompress` undoes it.
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns what travels, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor that it was."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""


def _to(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, Any]:
    if not tensor.dtype.is_floating or tensor.dtype.size <= dtype.size:
        return tensor, None
    return tf.cast(tensor, dtype), tensor.dtype


class FP16Compressor(Compressor):
    """Halves fp32: eleven bits of precision, values up to 65504; what is larger becomes infinite on all ranks."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor in fp16."""
        return _to(tensor, tf.float16)


class BF16Compressor(Compressor):
    """Halves fp32: eight bits of precision, the range of fp32."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor in bf16."""
        return _to(tensor, tf.bfloat16)


class Compression:
    """The compressors, under Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def checked(compression: Any) -> Any:
    """Takes one of `Compression`, or anything that has Horovod's two functions.

    Raises:
        ArgumentError: it has not.
    """
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        text = (
            f"compression={compression!r} is no compression: give one of coordd.tensorflow.Compression, or a class "
            "with the functions compress and decompress"
        )
        raise ArgumentError(text)
    return compression
