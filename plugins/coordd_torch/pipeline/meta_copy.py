"""Copies of a model without data, so that a process that no longer holds the whole model can trace it repeatedly."""

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
    """Returns a copy with parameters and buffers on the `meta` device; ties stay, other tensors are deep-copied."""
    return _copied(model, lambda tensor: torch.empty_like(tensor, device="meta"))


class Stand:
    """A model and its inputs as fake tensors for one trace: shapes, dtypes and devices, but no data."""

    def __init__(self, model: nn.Module, leaves: tuple[Any, ...]) -> None:
        """Creates the fake tensors of a model from `bare` and of its inputs, on the inputs' device.

        The device is the CPU if the inputs have none, or more than one.
        """
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
