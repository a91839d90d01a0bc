"""Top-k compression: sends the largest values only, and accumulates the others for later steps.

Source: Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
"""

from __future__ import annotations

import torch

from coordd.errors import ArgumentError
from coordd.ops.checks import finite
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.rounds import Gather, Rounds

__all__ = ["TopKCompressor"]


class TopKCompressor(Compressor):
    """Sends the largest values of each bucket with their indices; adds the rest to the next step's gradients.

    All ranks receive the values of all ranks, 8 bytes per fp32 value: 2 (n - 1) times ``ratio`` of the tensor's bytes
    for n ranks.
    """

    feedback = True

    def __init__(self, *, ratio: float = 0.01) -> None:
        """Creates a compressor.

        Args:
            ratio: share of the values that is sent, above 0 and at most 1; always at least one value.

        Raises:
            ArgumentError: `ratio` is out of range.
        """
        super().__init__()
        if not 0 < finite(ratio, "ratio") <= 1:
            text = f"the share of values that top-k sends is above 0 and at most 1, not {ratio}"
            raise ArgumentError(text)
        self._share = ratio

    @property
    def settings(self) -> tuple[object, ...]:
        """The ratio, which must be equal on all ranks."""
        return (self._share,)

    def exchange(self, cargo: Cargo) -> Rounds:
        """Gathers the values and indices of all ranks, and averages them."""
        flat = cargo.flat
        count = max(1, round(self._share * sum(part.numel() for part in cargo.parts)))
        places = flat.abs().topk(min(count, flat.numel()), sorted=False).indices
        values = flat[places].to(cargo.dtype)
        members = yield Gather(values, places.to(torch.int32 if flat.numel() <= 1 << 31 else torch.int64))
        flat[places] -= values.to(flat)
        mean = torch.zeros_like(flat)
        for theirs, where in members:
            mean[where.long()] += theirs.to(flat)
        return mean.div_(len(members))
