"""Gradient compression for Keras: selects the compressor of the backend that Keras runs on."""

from __future__ import annotations

from typing import Any

import keras

from coordd.errors import ArgumentError

__all__ = ["Compression", "compressor"]


class Compression:
    """Names of the compressors, as in Horovod."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"


def compressor(wanted: Any) -> Any:
    """Returns the backend's compressor for a name; returns a class with Horovod's functions as it is.

    Raises:
        ArgumentError: `wanted` is not a compressor, or it needs its own protocol, which only `coordd.torch` supports.
    """
    if keras.backend.backend() == "tensorflow":
        from coordd_tensorflow.compression import Compression as OfTensorFlow
        from coordd_tensorflow.compression import checked

        return checked(getattr(OfTensorFlow, wanted) if isinstance(wanted, str) else wanted)
    from coordd_torch.compression import Compression as OfTorch
    from coordd_torch.compression import made

    found = made(getattr(OfTorch, wanted) if isinstance(wanted, str) else wanted)
    if not found.simple:
        text = f"{type(found).__name__} is for coordd.torch: use Compression.fp16 or bf16"
        raise ArgumentError(text)
    return found
