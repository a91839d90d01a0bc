"""Broadcast of parameters and optimizer state, so that all ranks start from the same state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from coordd import api
from coordd.errors import ArgumentError
from coordd.ops.handles import wait_all
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd.parallel.collective_calls import CollectiveCall, collective
from coordd.parallel.objects import broadcast_object
from coordd.parallel.parameter_list import Inventory
from coordd_torch.as_horovod import fill_missing
from coordd_torch.operations import broadcast_async_

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

_EXTRA_STATE = "_extra_state"
"""How PyTorch names what a module's ``get_extra_state`` returns."""


@collective("broadcast_parameters")
def broadcast_parameters(
    _: CollectiveCall,
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the root's parameters to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors.
        root_rank: the global rank whose values are copied.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: `params` has another type, or contains dictionaries or lists of tensors.
        MismatchError: names differ between ranks, and nothing is copied; or a shape or dtype differs.
    """
    named = _named(params)
    names = sorted(name for name, _ in named)
    Inventory(
        api.operations(), names, caller="broadcast_parameters", name="broadcast.parameters", process_set=process_set
    ).check()
    wait_all(
        [
            broadcast_async_(tensor, root_rank, name=f"broadcast.{name}", process_set=process_set)
            for name, tensor in named
        ]
    )


def _named(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns tensors with names; leaves out other values, such as a module's extra state."""
    if isinstance(params, Mapping):
        found = [(str(name), value) for name, value in sorted(params.items(), key=lambda item: str(item[0]))]
    elif not isinstance(params, (str, bytes, torch.Tensor)) and hasattr(params, "__iter__"):
        found = [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(params)]
    else:
        text = f"invalid params of type: {type(params).__name__}; give model.state_dict() or named_parameters()"
        raise ArgumentError(text)
    for name, value in found:
        if not name.endswith(_EXTRA_STATE) and _nests(value):
            text = (
                f"{name!r} is a {type(value).__name__}: tensors inside it are not copied, so call broadcast_parameters "
                "for each state_dict(), broadcast_optimizer_state for that of an optimizer, and broadcast_object for "
                "anything else"
            )
            raise ArgumentError(text)
    return [(name, value) for name, value in found if isinstance(value, torch.Tensor)]


def _nests(value: Any) -> bool:
    """Returns whether a value is a dictionary or list, of any depth, with tensors in it."""
    leaves = pytree.tree_leaves(value)
    return not isinstance(value, torch.Tensor) and any(isinstance(leaf, torch.Tensor) for leaf in leaves)


@collective("broadcast_optimizer_state")
def broadcast_optimizer_state(
    _: CollectiveCall,
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # noqa: ARG001 - Horovod's signature
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the root's optimizer state, hyperparameters included, to all ranks.

    The state may be empty or of any shape on the other ranks, because they load the root's state; no step is made.
    Under ``as_horovod`` missing gradients of an optimizer without state are set to zeros, as in Horovod.

    Args:
        optimizer: any optimizer with PyTorch's interface, distributed or not.
        root_rank: the global rank whose state is copied.
        model: Horovod's argument, for a step that creates the state; not needed.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: `optimizer` is no optimizer.
    """
    if not hasattr(optimizer, "param_groups"):
        text = f"broadcast_optimizer_state() takes an optimizer, not a {type(optimizer).__name__}"
        raise ArgumentError(text)
    if api.operations().as_horovod and not optimizer.state_dict()["state"]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        fill_missing(parameters, sparse=isinstance(optimizer, torch.optim.SparseAdam))
    name = "broadcast.optimizer_state"
    tensors: list[torch.Tensor] = []
    skeleton = _hollow(optimizer.state_dict(), tensors) if api.rank() == root_rank else None
    shapes = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    skeleton, shapes = broadcast_object((skeleton, shapes), root_rank, name=name, process_set=process_set)
    if api.rank() != root_rank:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
    broadcast_parameters([(f"{name}.{index}", tensor) for index, tensor in enumerate(tensors)], root_rank, process_set)
    if api.rank() != root_rank:
        state = _filled(skeleton, tensors)
        optimizer.load_state_dict(state)
        _keep_types(optimizer, state)


def _keep_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restores state tensors that `load_state_dict` has converted to their parameter's dtype, unlike the root's.

    Some tensors of ASGD and NAdam, for example, are float32 for parameters of any dtype.
    """
    for group, sent in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], sent["params"], strict=True):
            loaded: Any = optimizer.state.get(parameter)
            for key, value in state["state"].get(number, {}).items() if isinstance(loaded, dict) else ():
                if isinstance(value, torch.Tensor) and getattr(loaded.get(key), "dtype", None) != value.dtype:
                    loaded[key] = value


class _Place:
    """Marks the position of a tensor that was taken out of a nest of containers."""

    def __init__(self, index: int) -> None:
        self.index = index


def _hollow(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns a copy of nested containers with `_Place` for each tensor; appends copies of the tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().clone())
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _hollow(item, tensors) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_hollow(item, tensors) for item in value)
    return value


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns a copy of nested containers with the tensors put back."""
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_filled(item, tensors) for item in value)
    return value
