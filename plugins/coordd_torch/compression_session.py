"""Compression session: drives the rounds of a compressor, independent of how they are exchanged.

Invariant: non-finite values are not hidden. A rank that has them sends a flag with the first round; then all ranks stop
after that round.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from coordd.errors import ArgumentError
from coordd.ops.messages import Kind
from coordd_torch.compression_stats import reduced
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.rounds import Round

__all__ = ["Journey", "calmly"]


class Journey:
    """Compression session of one tensor, or of one bucket in one step."""

    def __init__(self, compressor: Compressor, cargo: Cargo) -> None:
        """Creates the compressor's generator.

        Args:
            compressor: chooses the rounds.
            cargo: the values to reduce; at the end it holds the compression error.
        """
        self._compressor = compressor
        self._rounds = compressor.exchange(cargo)
        self._round: Round
        self._own = 0.0
        self.cargo = cargo
        self.present = 0
        """How many members take part, known after the first round; the others have joined."""
        self.number = 0
        """Number of the current round, from 0."""
        self.broken = False
        """Whether any rank had non-finite values; known after the first round."""
        self.mean: Tensor | None = None
        """The mean over the members; None until the session has succeeded."""
        self.tail: Tensor | None = None
        """The sum of the ranks' tails; None before the first round has completed."""

    @property
    def kind(self) -> Kind:
        """The operation of the current round."""
        return self._round.kind

    @property
    def splits(self) -> np.ndarray | None:
        """How many elements each member gets in an alltoall; None for other operations."""
        return self._round.splits

    def begin(self, tail: Tensor) -> np.ndarray:
        """Returns the array to exchange in the first round.

        Args:
            tail: a few numbers that are summed uncompressed.

        Raises:
            ArgumentError: the compressor yields no round.
        """
        flat = self.cargo.flat
        self._own = _norm(flat)
        broken = math.isnan(self._own)
        if broken:
            flat.zero_()
        first = next(self._rounds, None)
        if first is None:
            text = f"{type(self._compressor).__name__}.exchange() has to yield at least one round, such as Mean(tensor)"
            raise ArgumentError(text)
        self._round = first
        mine = torch.tensor([float(broken), 1.0], dtype=torch.float32, device="cpu")
        return first.pack(torch.cat([tail.float().cpu(), mine]))

    def land(self, array: np.ndarray) -> np.ndarray | None:
        """Processes the result of a round; returns the array of the next round, or None at the end."""
        members = self.cargo.size
        answer, tail = self._round.open(array, members, self.present)
        plain = sum(part.numel() for part in self.cargo.parts) * self.cargo.dtype.itemsize
        self._compressor.gauge.travelled(
            self._round.received(members), plain=0.0 if self.number else reduced(plain, members)
        )
        if tail is not None:
            self.tail, self.broken, self.present = tail[:-2], bool(tail[-2]), round(float(tail[-1]))
        if self.broken:
            self._rounds.close()
            return None
        try:
            self._round = self._rounds.send(answer)
        except StopIteration as end:
            self.mean = end.value
            self._compressor.gauge.compare(self._own, _norm(self.cargo.flat))
            return None
        self.number += 1
        return self._round.pack(None)


@contextlib.contextmanager
def calmly(like: Tensor) -> Iterator[None]:
    """Disables autograd and autocast on the tensor's device type."""
    kind = like.device.type
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _norm(flat: Tensor) -> float:
    """Returns the L2 norm: NaN if a value is not finite, infinity if only the norm exceeds the range of the dtype."""
    found = float(torch.linalg.vector_norm(flat))
    if math.isfinite(found):
        return found
    return math.inf if bool(torch.isfinite(flat).all()) else math.nan
