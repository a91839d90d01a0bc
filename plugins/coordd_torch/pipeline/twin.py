"""A copy of a model without its data: for tracing, again and again, where nobody has the whole model any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError

__all__ = ["Stand", "bare"]


def bare(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the device `meta`, tied as they are; other tensors are copied."""
    return _copied(model, lambda tensor: torch.empty_like(tensor, device="meta"))


class Stand:
    """A model and inputs that have shapes, types and devices, but no data, for one trace."""

    def __init__(self, model: nn.Module, leaves: tuple[Any, ...]) -> None:
        """Takes the model from `bare` and makes its tensors look as if they lay where the inputs lie."""
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self.model = _copied(model, self._fake)
        self.leaves = pytree.tree_map_only(torch.Tensor, lambda leaf: self._fake(leaf.detach()), leaves)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)


def _copied(model: nn.Module, new: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(new(parameter.detach()), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = new(buffer)
    try:
        return copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied, as it must be to find its layers ({error}): keep no computed "
            "tensors in modules; torch.nn.utils.parametrizations has weight_norm and spectral_norm that do not"
        ) from error
