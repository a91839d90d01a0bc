"""Memory that the C library keeps although it is free."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["give_back"]


def give_back() -> None:
    """Returns freed memory to the operating system, where the C library supports it (glibc's `malloc_trim`)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
