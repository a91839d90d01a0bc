"""Compression statistics: bytes on the wire, and the compression error."""

from __future__ import annotations

import math

__all__ = ["Gauge"]

_MEMORY = 0.99


class Gauge:
    """Statistics of one compressor over all its tensors; the daemon's thread writes, any thread may read."""

    def __init__(self) -> None:
        self.plain_bytes = 0.0
        """Bytes that this rank would have received without compression."""
        self.bytes = 0.0
        """Bytes that this rank received."""
        self._own = 0.0
        self._lost = 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were received than without compression; 1 before the first transfer."""
        return self.plain_bytes / self.bytes if self.bytes else 1.0

    @property
    def error(self) -> float:
        """The relative L2 norm of the compression error of about the last hundred tensors of this rank."""
        return math.sqrt(self._lost / self._own) if self._own else 0.0

    def travelled(self, received: float, *, plain: float) -> None:
        """Counts received bytes, and the bytes of the same transfer without compression."""
        self.bytes += received
        self.plain_bytes += plain

    def compare(self, own: float, lost: float) -> None:
        """Adds the norm of a tensor and the norm of its compression error; ignores non-finite norms."""
        if math.isfinite(own) and math.isfinite(lost):
            self._own = _MEMORY * self._own + own * own
            self._lost = _MEMORY * self._lost + lost * lost


def reduced(nbytes: int, size: int) -> float:
    """Returns the bytes that each of ``size`` members receives in a reduce-scatter and allgather of ``nbytes``."""
    return 2 * (size - 1) / size * nbytes
