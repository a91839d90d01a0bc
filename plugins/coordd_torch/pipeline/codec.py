"""PyTorch's tensors in frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coordd.errors import ArgumentError
from coordd.pipeline.storage import laid
from coordd_torch.tensors import check_dense, from_array, view

__all__ = ["TorchCodec", "can_require_grad"]


@dataclass(frozen=True)
class TorchCodec:
    """The `coordd.pipeline.frame.Codec` of PyTorch.

    Attributes:
        device: where tensors arrive; on the CPU they are views of the frame.
    """

    device: torch.device = torch.device("cpu")

    def is_tensor(self, value: object) -> bool:
        """Says whether a value is a tensor."""
        return isinstance(value, torch.Tensor)

    def differentiable(self, tensor: torch.Tensor) -> bool:
        """Says whether gradients flow through a tensor."""
        return tensor.requires_grad

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        """Views a tensor's values; those on another device are copied.

        Raises:
            ArgumentError: the tensor is sparse, or of a type that NumPy does not have.
        """
        check_dense(tensor)
        host = tensor.detach().resolve_conj().resolve_neg().cpu()
        try:
            return view(host)
        except TypeError as error:
            text = f"a tensor of {tensor.dtype} cannot travel between stages"
            raise ArgumentError(text) from error

    def tensor(self, array: np.ndarray, *, differentiable: bool) -> torch.Tensor:
        """Views an array as a leaf of a new graph, that requires a gradient if the sender's tensor did."""
        lying, axes = laid(array)
        tensor = from_array(lying).permute(axes).to(self.device)
        return tensor.requires_grad_() if differentiable else tensor


def can_require_grad(value: Any) -> bool:
    """Says whether a value is a tensor that could have a gradient."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
