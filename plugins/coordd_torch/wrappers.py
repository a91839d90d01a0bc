"""Finds parameters that belong to another package that reduces gradients itself, and says so in a sentence."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch

from coordd.errors import ArgumentError

__all__ = ["check_parallel", "check_plain"]

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
    for found in _instances(_wrappers()):
        if not mine.isdisjoint(map(id, found.parameters())):
            return type(found).__name__
    return ""


def _instances(kinds: Iterable[type]) -> list[Any]:
    """Finds all objects of some classes, to which they refer.

    A list of all objects would also have the tuples that other threads are making at that moment, which Python can then
    no longer complete: those threads would get a SystemError. Objects are known by their types themselves, for some
    answer with a warning when they are asked for their class.
    """
    wanted = _with_subclasses(kinds)
    return [found for found in gc.get_referrers(*wanted) if type(found) in wanted]


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    found = set(kinds)
    for kind in list(found):
        found |= _with_subclasses(kind.__subclasses__())
    return found


def _wrappers() -> tuple[type, ...]:
    """The classes of PyTorch that wrap a model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    ddp = torch.nn.parallel.DistributedDataParallel
    return (ddp,) if fsdp is None else (ddp, fsdp.FullyShardedDataParallel)


def check_plain(model: torch.nn.Module) -> None:
    """Refuses a model for a pipeline of which another package reduces gradients, or has a part only on each rank.

    Raises:
        ArgumentError: it names the package and what to do.
    """
    kinds = _wrappers()
    wrapped = next((type(module).__name__ for module in model.modules() if isinstance(module, kinds)), "")
    if owner := wrapped or next(filter(None, map(_marked, model.parameters())), ""):
        text = (
            f"the gradients of this model are reduced by {owner} already: give Pipeline the plain model, before "
            "anything wraps it; PipelineConfig(data_parallel=n) makes n replicas of it"
        )
        raise ArgumentError(text)
