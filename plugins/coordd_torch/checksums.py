"""Checksums of tensors, with which ranks compare values without sending them."""

from __future__ import annotations

import zlib

import torch

from coordd_torch.tensors import as_bytes

__all__ = ["checksum"]

_VALUES = 256
"""About this many values of each tensor enter its checksum, spread evenly over it."""


def checksum(tensor: torch.Tensor) -> str:
    """Returns 8 hexadecimal digits that depend on a sample of the tensor's values.

    Returns "" for a tensor on the meta device, a tensor without elements, and a sparse tensor.
    """
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)
    return f"{zlib.crc32(as_bytes(flat[:: max(1, flat.numel() // _VALUES)]).numpy().tobytes()):08x}"
