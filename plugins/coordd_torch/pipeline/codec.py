"""Conversion of PyTorch tensors to frames and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd.pipeline.storage import laid
from coordd.transport.shared_memory.loans import blank
from coordd_torch.tensors import check_dense, from_array, view

__all__ = ["TorchCodec", "enter", "leaf"]


@dataclass(frozen=True)
class TorchCodec:
    """The `coordd.pipeline.frame.Codec` of PyTorch.

    Attributes:
        device: where received tensors are placed; on the CPU they are views of the frame.
        blank: allocates memory for frames.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    blank: Callable[[int], np.ndarray] = blank

    @classmethod
    def of(cls, module: nn.Module, blank: Callable[[int], np.ndarray]) -> TorchCodec:
        """Creates the codec of a stage, for the device of its parameters; the CPU if it has none."""
        return cls(next((each.device for each in module.parameters()), torch.device("cpu")), blank)

    def is_tensor(self, value: object) -> bool:
        """Returns whether a value is a tensor."""
        return isinstance(value, torch.Tensor)

    def differentiable(self, tensor: torch.Tensor) -> bool:
        """Returns whether gradients flow through a tensor."""
        return tensor.requires_grad

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        """Returns a tensor's values as a view; values on another device are copied.

        Raises:
            ArgumentError: the tensor is sparse, or its dtype does not exist in NumPy.
        """
        check_dense(tensor)
        host = tensor.detach().resolve_conj().resolve_neg().cpu()
        try:
            return view(host)
        except TypeError as error:
            text = f"a tensor of {tensor.dtype} cannot travel between stages"
            raise ArgumentError(text) from error

    def tensor(self, array: np.ndarray, *, differentiable: bool) -> torch.Tensor:
        """Views an array as a tensor, which starts a new graph if gradients flow through the sender's tensor.

        It may be changed in place, unlike a leaf: a stage may begin with ``ReLU(inplace=True)``.
        """
        lying, axes = laid(array)
        tensor = from_array(lying).permute(axes).to(self.device)
        return enter(tensor) if differentiable else tensor


def enter(tensor: torch.Tensor) -> torch.Tensor:
    """Starts a new graph at a tensor, which becomes a leaf; the returned tensor may be changed in place."""
    with torch.enable_grad():
        entered: torch.Tensor = _Entrance.apply(tensor.requires_grad_())  # type: ignore[no-untyped-call]  # torch's
        return entered


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the leaf that has the gradient of a tensor that entered; the tensor itself if it has no graph."""
    if tensor.grad_fn is None:
        return tensor
    found: torch.Tensor = tensor.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]  # `_Entrance`
    return found


class _Entrance(torch.autograd.Function):
    """The identity without a copy; its result is not a view of a leaf."""

    @staticmethod
    def forward(_ctx: Any, entering: torch.Tensor) -> torch.Tensor:
        return entering.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
