"""Whether all ranks have given their optimizers the same parameters: asked when it is made, heard in the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from coordd import api
from coordd.errors import MismatchError, spans
from coordd.messages import ReduceOp
from coordd_torch.channel import Channel
from coordd_torch.state import allgather_object

__all__ = ["Inventory"]

_SHOWN = 5


class Inventory:
    """Names, shapes and types of the parameters, and how they are compressed, as a print.

    Its least and its greatest must be equal.
    """

    def __init__(self, channel: Channel, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Asks; nobody waits for it."""
        self._lines = sorted(f"{name} {tuple(value.shape)} {str(value.dtype)[6:]}" for name, value in parameters)
        self._lines += [channel.compressor.title]
        self._channel = channel
        digest = hashlib.sha256("\n".join(self._lines).encode()).digest()
        number = int.from_bytes(digest[:7], "little")
        self._handle = channel.ask(np.array([number, -number]), "inventory", ReduceOp.MAX)

    def check(self) -> None:
        """Hears the others.

        Raises:
            MismatchError: the parameters differ; it names some that not all ranks have.
        """
        greatest, least = self._handle.result().tolist()
        if greatest == -least:
            return
        name, process_set = f"{self._channel.prefix}inventory.lines", self._channel.process_set
        everybody = allgather_object((api.rank(), self._lines), name, process_set)
        had: dict[str, list[int]] = {}
        for rank, lines in everybody:
            for line in lines:
                had.setdefault(line, []).append(rank)
        partial = [
            f"{line} on rank {spans(owners)} only" for line, owners in had.items() if len(owners) < len(everybody)
        ]
        rest = f" and {len(partial) - _SHOWN} more" if len(partial) > _SHOWN else ""
        text = f"the ranks have given different parameters to DistributedOptimizer: {'; '.join(partial[:_SHOWN])}{rest}"
        raise MismatchError.told("DistributedOptimizer", "parameters", text)
