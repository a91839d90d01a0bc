"""Detection of parameters whose gradients another package reduces itself."""

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
"""Packages whose optimizers communicate with other ranks."""


def check_parallel(optimizer: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Rejects parameters whose gradients would be reduced twice, or that are sharded over ranks.

    ``torch.nn.DataParallel`` is accepted: it reduces within one process.

    Args:
        optimizer: the user's optimizer.
        parameters: its trained parameters.

    Raises:
        ArgumentError: another package reduces or shards them; the message names it and the remedy.
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
    """Returns the name of the package that has sharded a parameter, or ""."""
    tensors = sys.modules.get("torch.distributed.tensor")  # loaded in any process that has a DTensor
    if tensors is not None and isinstance(parameter, tensors.DTensor):
        return "fully_shard, or whatever has made them a DTensor,"
    return next((name for mark, name in _MARKS.items() if getattr(parameter, mark, None) not in {None, False}), "")


def _wrapped(parameters: list[torch.Tensor]) -> str:
    """Returns the class name of a wrapper around a model with these parameters, or "".

    Wrappers leave no mark on parameters, so all wrapper objects are searched. None can exist without a process group of
    PyTorch, so most jobs skip the search.
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
    """Returns all objects of some classes and their subclasses, found as referrers of the classes.

    A list of all objects would contain tuples that other threads are still creating, which Python can then no longer
    complete: those threads would get a SystemError. Objects are tested by `type`, because some of them issue a warning
    when their `__class__` is read.
    """
    wanted = _with_subclasses(kinds)
    return [found for found in gc.get_referrers(*wanted) if type(found) in wanted]


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    found = set(kinds)
    for kind in list(found):
        found |= _with_subclasses(kind.__subclasses__())
    return found


def _wrappers() -> tuple[type, ...]:
    """Returns PyTorch's classes that wrap a model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    ddp = torch.nn.parallel.DistributedDataParallel
    return (ddp,) if fsdp is None else (ddp, fsdp.FullyShardedDataParallel)


def check_plain(model: torch.nn.Module) -> None:
    """Rejects a model for a pipeline if another package reduces its gradients or shards it over ranks.

    Raises:
        ArgumentError: there is such a package; the message names it and the remedy.
    """
    kinds = _wrappers()
    wrapped = next((type(module).__name__ for module in model.modules() if isinstance(module, kinds)), "")
    if owner := wrapped or next(filter(None, map(_marked, model.parameters())), ""):
        text = (
            f"the gradients of this model are reduced by {owner} already: give Pipeline the plain model, before "
            "anything wraps it; PipelineConfig(data_parallel=n) makes n replicas of it"
        )
        raise ArgumentError(text)
