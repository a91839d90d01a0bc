"""Gradient compression: none, or a 16-bit float dtype. Ranks add the values in fp32 in any case."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coordd.errors import ArgumentError

__all__ = ["Compression", "Compressor", "checked"]


class Compressor:
    """Compresses tensors before a reduction; subclass it for other methods.

    The outputs of `compress` are summed element by element; `decompress` converts the sum back.
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the compressed tensor, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor in its original dtype."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class NoneCompressor(Compressor):
    """Leaves tensors unchanged."""


def _to(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, Any]:
    if not tensor.dtype.is_floating or tensor.dtype.size <= dtype.size:
        return tensor, None
    return tf.cast(tensor, dtype), tensor.dtype


class FP16Compressor(Compressor):
    """Halves fp32: 11 bits of precision, values up to 65504; larger ones become infinite on all ranks."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor in fp16."""
        return _to(tensor, tf.float16)


class BF16Compressor(Compressor):
    """Halves fp32: 8 bits of precision, the range of fp32."""

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
    """Returns one of `Compression`, or any object with Horovod's two functions.

    Raises:
        ArgumentError: it lacks one of the functions.
    """
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        text = (
            f"compression={compression!r} is no compression: give one of coordd.tensorflow.Compression, or a class "
            "with the functions compress and decompress"
        )
        raise ArgumentError(text)
    return compression
