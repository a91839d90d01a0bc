"""Whether all ranks have given their optimizers the same parameters: asked when it is made, heard in the first step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from coordd import api
from coordd.errors import MismatchError
from coordd.messages import ReduceOp
from coordd_torch.census import alike, differences, fingerprint
from coordd_torch.channel import Channel
from coordd_torch.state import allgather_object

__all__ = ["Inventory"]


class Inventory:
    """Names, shapes and types of the parameters, and how they are compressed."""

    def __init__(self, channel: Channel, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Asks; nobody waits for it."""
        self._lines = sorted(f"{name} {tuple(value.shape)} {str(value.dtype)[6:]}" for name, value in parameters)
        self._lines += [channel.compressor.title]
        self._channel = channel
        self._handle = channel.ask(np.array(fingerprint(self._lines)), "inventory", ReduceOp.MAX)

    def check(self) -> None:
        """Hears the others.

        Raises:
            MismatchError: the parameters differ; it names some that not all ranks have.
        """
        if alike(self._handle.result().tolist()):
            return
        name, process_set = f"{self._channel.prefix}inventory.lines", self._channel.process_set
        everybody = allgather_object((api.rank(), self._lines), name, process_set)
        text = f"the ranks have given different parameters to DistributedOptimizer: {differences(everybody)}"
        raise MismatchError.told("DistributedOptimizer", "parameters", text)
