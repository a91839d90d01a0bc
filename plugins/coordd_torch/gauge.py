"""What a compression saves and what it costs: bytes on the wire, and how much of the values is lost."""

from __future__ import annotations

import math

__all__ = ["Gauge"]

_MEMORY = 0.99


class Gauge:
    """Counts for one compressor, over all its tensors; written by the daemon's thread, read by anybody."""

    def __init__(self) -> None:
        self.plain_bytes = 0.0
        """Bytes that this rank would have received without compression."""
        self.bytes = 0.0
        """Bytes that this rank has received."""
        self._own = 0.0
        self._lost = 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes have travelled than without compression; 1 before anything has."""
        return self.plain_bytes / self.bytes if self.bytes else 1.0

    @property
    def error(self) -> float:
        """The relative L2 norm of what was lost of this rank's tensors, about the last hundred of them."""
        return math.sqrt(self._lost / self._own) if self._own else 0.0

    def travelled(self, received: float, *, plain: float) -> None:
        """Counts bytes that have arrived, and those that would have."""
        self.bytes += received
        self.plain_bytes += plain

    def compare(self, own: float, lost: float) -> None:
        """Takes in the norm of a tensor, and of what was lost of it."""
        if math.isfinite(own) and math.isfinite(lost):
            self._own = _MEMORY * self._own + own * own
            self._lost = _MEMORY * self._lost + lost * lost


def reduced(nbytes: int, size: int) -> float:
    """Bytes that each of ``size`` members receives while they reduce so many: slices first, then results."""
    return 2 * (size - 1) / size * nbytes
