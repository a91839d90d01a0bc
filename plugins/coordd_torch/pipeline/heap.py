"""Memory that the C library keeps although nobody uses it."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["give_back"]


def give_back() -> None:
    """Gives freed memory back to the operating system, where the C library knows how (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
