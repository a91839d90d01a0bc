"""The weights of a stage, in the form that `coordd.pipeline.versions` needs to stash older versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Weights"]


class Weights:
    """PyTorch implementation of `coordd.pipeline.versions.Weights`: swaps the memory of parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def held(self) -> list[torch.Tensor]:
        """Returns the memory of each parameter."""
        return [parameter.data for parameter in self._parameters]

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Makes the parameters use the given memory."""
        for parameter, data in zip(self._parameters, values, strict=True):
            parameter.data = data

    def renew(self) -> None:
        """Copies the parameters into new memory; memory from `held` keeps the old values."""
        self.put([data.clone() for data in self.held()])
