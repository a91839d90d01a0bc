"""A cargo's way through the rounds of its compressor, wherever they are carried out.

Its one rule: what is not finite is not hidden. A rank that has it says so beside the first round; then all ranks stop
there, alike.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from coordd.errors import ArgumentError
from coordd.messages import Kind
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.gauge import reduced
from coordd_torch.rounds import Round

__all__ = ["Journey", "calmly"]


class Journey:
    """One tensor, or one bucket in one step."""

    def __init__(self, compressor: Compressor, cargo: Cargo) -> None:
        """Gets ready.

        Args:
            compressor: what travels is its choice.
            cargo: what is to be reduced; in the end it holds what was lost.
        """
        self._compressor = compressor
        self._rounds = compressor.exchange(cargo)
        self._round: Round
        self._own = 0.0
        self.cargo = cargo
        self.present = 0
        """How many members take part; known since the first round. The others have joined."""
        self.number = 0
        """Of the round that is under way."""
        self.broken = False
        """Whether any rank had what is not finite."""
        self.mean: Tensor | None = None
        """Over the members; there once the journey has ended well."""
        self.tail: Tensor | None = None
        """The sum of what travelled beside; there since the first round."""

    @property
    def kind(self) -> Kind:
        """The operation of the round that is under way."""
        return self._round.kind

    @property
    def splits(self) -> np.ndarray | None:
        """How much of it each member gets, if not all."""
        return self._round.splits

    def begin(self, tail: Tensor) -> np.ndarray:
        """Returns what travels in the first round.

        Args:
            tail: few numbers that have to arrive as they are, and are added up.

        Raises:
            ArgumentError: the compressor has nothing to send.
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
        """Takes what has arrived; returns what travels in the next round, or None at the end."""
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
    """Computes without autograd, and in the types that are there, whatever the user's code around it wants."""
    kind = like.device.type
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _norm(flat: Tensor) -> float:
    """Returns the L2 norm; NaN if a value is not finite, infinity if only the norm is too large for its type."""
    found = float(torch.linalg.vector_norm(flat))
    if math.isfinite(found):
        return found
    return math.inf if bool(torch.isfinite(flat).all()) else math.nan
