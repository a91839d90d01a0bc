"""The weights of a stage as something of which older versions can be kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Weights"]


class Weights:
    """The `coordd.pipeline.versions.Weights` of PyTorch: parameters, whose memory is put in and out of them."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def held(self) -> list[torch.Tensor]:
        """The memory of each."""
        return [parameter.data for parameter in self._parameters]

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Puts memory in place."""
        for parameter, data in zip(self._parameters, values, strict=True):
            parameter.data = data

    def renew(self) -> None:
        """Copies what is there into new memory."""
        self.put([data.clone() for data in self.held()])
