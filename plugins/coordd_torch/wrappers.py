"""Finds parameters that belong to another package that reduces gradients itself, and says so in a sentence."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch

from coordd.errors import ArgumentError

__all__ = ["check_parallel"]

_MARKS = {
    "_is_flat_param": "FullyShardedDataParallel",
    "_fsdp_flattened": "FullyShardedDataParallel",
    "ds_id": "DeepSpeed ZeRO",
}
"""Attributes that packages leave on parameters."""
_OPTIMIZERS = ("deepspeed", "torch.distributed.optim", "apex.contrib.optimizers")
"""Packages whose optimizers talk to other ranks."""


def check_parallel(optimizer: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Refuses parameters whose gradients would be reduced twice, or of which a rank has a part only.

    ``torch.nn.DataParallel`` is fine: it adds up within one process.

    Args:
        optimizer: the user's.
        parameters: those of it that are trained.

    Raises:
        ArgumentError: it names the package and what to do.
    """
    held = list(parameters)
    owner = _owner_of(optimizer) or next(filter(None, map(_marked, held)), "") or _wrapped(held)
    if owner:
        text = (
            f"the gradients of these parameters are reduced by {owner} already: give DistributedOptimizer the plain "
            f"model's parameters, before anything wraps it, or use {owner} without DistributedOptimizer"
        )
        raise ArgumentError(text)


def _owner_of(optimizer: Any) -> str:
    kind = type(optimizer)
    distributed = kind.__module__.startswith(_OPTIMIZERS)
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__}" if distributed else ""


def _marked(parameter: torch.Tensor) -> str:
    """Names the package that has sharded a parameter."""
    tensors = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has loaded it
    if tensors is not None and isinstance(parameter, tensors.DTensor):
        return "fully_shard, or whatever has made them a DTensor,"
    return next((name for mark, name in _MARKS.items() if getattr(parameter, mark, None) not in {None, False}), "")


def _wrapped(parameters: list[torch.Tensor]) -> str:
    """Looks for a wrapper of a model with these parameters; it leaves no trace on them.

    None can exist without a process group of PyTorch's, so in most jobs nothing is looked for.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    mine = set(map(id, parameters))
    kinds: list[type] = [torch.nn.parallel.DistributedDataParallel]
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        kinds.append(fsdp.FullyShardedDataParallel)
    for found in gc.get_objects():
        # By the type itself: `isinstance` also asks an object for its class, which some answer with a warning.
        if issubclass(type(found), tuple(kinds)) and not mine.isdisjoint(map(id, found.parameters())):
            return type(found).__name__
    return ""
